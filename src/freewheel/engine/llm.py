# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a model that answers."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from freewheel.chat import Ask, Effort
from freewheel.config import EngineConfig, find_model
from freewheel.engine.arguments import (
    Prompt,
    check_one,
    check_priority,
    is_list,
    kind_of,
    names_its_arguments,
    opened,
    param_list,
    priorities,
    prompt_list,
)
from freewheel.engine.conversation import Turns, conversations, messages_of, parted
from freewheel.engine.output import Chunk, Output, Selection, joined
from freewheel.engine.parts import Parts
from freewheel.engine.session import Live, Session
from freewheel.engine.tokenizer import Tokenizer
from freewheel.engine.wishes import adjustments_of
from freewheel.errors import ClosedError, ConfigError, RequestError
from freewheel.host import Alarm, Request, TextStream
from freewheel.runtime import Built, Executor
from freewheel.spec import Form, HostGrammar, SamplingParams, StepShape
from freewheel.spec.elsewhere import hint
from freewheel.spec.picks import picked_layers
from freewheel.spec.sampling import DEFAULT_MAX_TOKENS
from freewheel.structured import Compiler, GuideDesk, Wish

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
"""Of a request that is asked something else than an answer."""


class LLM:
    """One model, loaded, with its caches and graphs. Not thread-safe, but for `close`.

    `model` is a folder in Hugging Face layout or the name of a shipped model; options are the
    fields of EngineConfig. Raises ConfigError, or CheckpointError for an unusable folder.

    >>> from freewheel import LLM, SamplingParams
    >>> llm = LLM(model="demo", speculate=3)
    >>> llm.generate("Emma was", SamplingParams(temperature=0, max_tokens=16))[0].text

    `close` gives back what it took, and so does the end of `with LLM(..) as llm:`.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        """`progress` is called with (bytes read, bytes in all) while weights load."""
        known = {one.name for one in fields(EngineConfig)}
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(
                "\n".join(f"{name}: is no option; {hint(name, known)}" for name in unknown)
            )
        self.config = EngineConfig(model=model, **options)
        self.tokenizer = Tokenizer(find_model(model))
        self.alarm = Alarm(self.config.strict)
        self._open: Parts | None = Parts(self.config, self.tokenizer, self.alarm, progress)
        self.spec, self._came_to = self.built.spec, self.built.resolved
        self._ids = (f"request-{n}" for n in itertools.count())

    def close(self) -> None:
        """End what is under way and give back all that the engine took: the device's memory, that
        of cached prefixes, and its processes. Again: nothing. Anything else raises ClosedError,
        streams that other threads read too.

        What it keeps in files stays there.
        """
        parts, self._open = self._open, None
        if parts is not None:
            parts.close()

    def __repr__(self) -> str:
        came_to, closed = self._came_to, ", closed" if self._open is None else ""
        return f"<LLM {self.config.model!r} on {came_to.device}, {came_to.dtype}{closed}>"

    def __enter__(self) -> LLM:
        self._parts  # noqa: B018  raises if it was closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _parts(self) -> Parts:
        if self._open is None:
            raise ClosedError("this LLM was closed; make another one")
        return self._open

    @property
    def built(self) -> Built:
        """What the options came to."""
        return self._parts.built

    @property
    def executor(self) -> Executor:
        """What runs rounds."""
        return self._parts.built.executor

    @property
    def _session(self) -> Session:
        return self._parts.session

    @property
    def _compiler(self) -> Compiler:
        return self._parts.compiler

    @property
    def _guides(self) -> GuideDesk:
        return self._parts.guides

    @property
    def context_len(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.built.sizes.row_width

    @property
    def computed(self) -> int:
        """Tokens of requests under way that are computed so far: how far a long prompt is."""
        return self._session.computed

    def shapes(
        self, prompt: Prompt | None = None, extras: int = 0, *, guided: bool = False
    ) -> tuple[StepShape, ...]:
        """Every rectangle, or those that a request of `prompt` alone runs through; largest first.

        `extras`: also rounds that do more than choose, up to so much (0 to 3, see
        `StepShape.extras`). `guided`: of these also those whose letters bring masks, where no
        prompt is given. Raises RequestError if the prompt is neither text nor ids.
        """
        ladder = self.built.ladder
        if prompt is None:
            return ladder.shapes(extras, guided)
        alone = ladder.shapes_of_one(len(self._request(prompt, SamplingParams(), "").prompt))
        return tuple(s for s in ladder.shapes(extras) if replace(s, extras=0) in alone)

    def capture(
        self,
        progress: Callable[[StepShape], None] = lambda _: None,
        extras: int = 0,
        *,
        prompt: Prompt | None = None,
        guided: bool = False,
    ) -> None:
        """Make every graph now, rather than each when it is first needed.

        `extras`, `prompt` and `guided`: those that `shapes` names; others are made when a request
        first asks for them. Raises what `shapes` raises.
        """
        shapes = self.shapes(prompt, extras, guided=guided)
        self.executor.capture(shapes, progress)
        policy = self._parts.policy
        if policy is not None:
            for shape in shapes:
                if not (shape.for_prompts or shape.extras or shape.tables or shape.catches_up):
                    policy.took_empty(shape, self.executor.idle_seconds(shape))

    @names_its_arguments
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        at_once: int | None = None,
        cache_salt: str = "",
        priority: int | Sequence[int] = 0,
    ) -> list[Output]:
        """One output for each prompt, in order. `params`: one for all, or one each.

        `at_once`: requests under way together; the next is queued when one of them ends. None
        queues all now. `cache_salt`: only requests with the same one find each other's cached
        prompts. `priority`: one for all, or one each; the lower goes first. Raises RequestError,
        naming the field, before anything runs if any request is invalid.
        """
        if at_once is not None and at_once < 1:
            raise RequestError("at_once", f"must be at least 1, got {at_once}")
        many = prompt_list(prompts)
        each = param_list(params, len(many))
        ranks = priorities(priority, len(many))
        requests = [
            self._request(prompt, own, cache_salt, priority=rank)
            for prompt, own, rank in zip(many, each, ranks, strict=True)
        ]
        for request in requests:
            self._check(request)
        session = self._session
        try:
            live = self._queue(requests, at_once or len(requests))
            return [joined(list(session.chunks(one))) for one in live]
        finally:
            session.close([request.id for request in requests])

    @names_its_arguments
    def chat(
        self,
        messages: Turns | Sequence[Turns],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        effort: Effort | None = None,
        continue_final_message: bool = False,
        cache_salt: str = "",
    ) -> list[Output]:
        """The next turn of a conversation, or of each of several, in order.

        `messages`: turns such as `{"role": "user", "content": "Hello"}`; `thinking`: the model may
        think first, and `effort` how much; its thoughts are the output's `reasoning`, not part of
        its text. `continue_final_message`: the last turn is the model's own, and the answer is the
        rest of it. Raises what `generate` raises, RequestError for turns that the model's encoding
        does not have, and UnsupportedModel if there is none.
        """
        encoding = self._parts.encoding
        thinks = thinking or effort is not None
        ask = Ask(thinks, effort, continues=continue_final_message)
        asked = [messages_of(turns) for turns in conversations(messages)]
        prompts = [encoding.prompt(turns, ask) for turns in asked]
        outputs = self.generate([one.ids for one in prompts], params, cache_salt=cache_salt)
        given = zip(outputs, prompts, param_list(params, len(prompts)), strict=True)
        part = partial(parted, self.tokenizer, self.spec.eos_ids)
        return [part(output, prompt, own) for output, prompt, own in given]

    def check_room(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise RequestError if more tokens are asked for than the context has room for.

        `generate` and `stream` end such an answer there. The default of `max_tokens` is no wish.
        """
        tokens = len(self._request(prompt, ONE_TOKEN, "").prompt)
        asked, room = params.max_tokens, self.context_len - tokens
        if asked is not None and asked > max(room, 0) and asked != DEFAULT_MAX_TOKENS:
            raise RequestError(
                "max_tokens",
                f"{asked} asked for, but with a prompt of {tokens} tokens a context of "
                f"{self.context_len} has room for {max(room, 0)}",
            )

    def _queue(self, requests: list[Request], at_once: int) -> list[Live]:
        """Queue each request as soon as fewer than `at_once` of those before it are under way."""
        live: list[Live] = []
        under_way: list[Live] = []
        for request in requests:
            while len(under_way) == at_once:
                self._session.step()
                under_way = [one for one in under_way if not self._session.ended(one)]
            one = self._session.add(request, self._text_of(request))
            live.append(one)
            under_way.append(one)
        return live

    @names_its_arguments
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generator[Chunk]:
        """The answer, round by round; the last chunk carries the finish reason and metrics.

        Raises RequestError at once if the request is invalid. It is queued when the first chunk is
        asked for; closing the iterator early aborts it. Streams may be read in any order, and
        `generate` called between their chunks: whatever runs shares its rounds.
        """
        check_one(prompt)
        given = SamplingParams() if params is None else params
        request = self._request(prompt, given, cache_salt, priority=priority)
        self._check(request)
        return self._chunks(request)

    def selection(self, prompt: Prompt, *, cache_salt: str = "", priority: int = 0) -> Selection:
        """Which earlier tokens the indexers select for the last token of `prompt`, layer by layer.

        The prompt is computed, or found in the cache, as that of any request; the lists come home
        in its round's letter. So what a token of an answer was chosen from is asked with the text
        before it. Raises RequestError if the prompt is invalid or the engine has several copies.
        """
        check_one(prompt)
        request = self._request(prompt, ONE_TOKEN, cache_salt, priority=priority, shows=True)
        self._check(request)
        for _ in self._chunks(request):
            pass
        return Selection(picked_layers(self.spec), request.picks, request.output[0])

    def _check(self, request: Request) -> None:
        """Raise RequestError if `request` could not be served, or not by this engine's role."""
        if self.config.role is not None:
            raise RequestError(
                "role", "only servers take and give prompts: freewheel serve --role; leave it out"
            )
        self._session.check(request)

    def _chunks(self, request: Request) -> Generator[Chunk]:
        session = self._session
        try:
            yield from session.chunks(session.add(request, self._text_of(request)))
        finally:
            session.close([request.id])

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str,
        form: Form | None = None,
        priority: int = 0,
        tenant: str = "",
        shows: bool = False,
    ) -> Request:
        check_priority(priority)
        prompt, cache_salt = opened(prompt, cache_salt)
        if not isinstance(cache_salt, str):
            raise RequestError("cache_salt", f"must be text, got {kind_of(cache_salt)}")
        if not isinstance(params, SamplingParams):
            raise RequestError("params", f"must be SamplingParams, got {kind_of(params)}")
        if isinstance(prompt, str):
            ids = tuple(self.tokenizer.encode_prompt(prompt))
        elif is_list(prompt):
            ids = tuple(prompt)
        else:
            raise RequestError("prompt", f"must be text or a list of ids, got {kind_of(prompt)}")
        self._check_ids("prompt", ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.structure is not None and not (self.spec.eos_ids or params.stop_token_ids):
            raise RequestError(
                params.structure[0], "needs an end, and this model has none; give stop_token_ids"
            )
        eos = () if params.ignore_eos else self.spec.eos_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        self._check_ids("logit_bias", tuple(token for token, _ in params.biases))
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if params.grammar_trigger is not None:
            self._check_ids("grammar_trigger", (params.grammar_trigger,))
        form = form or self.form_of(params)
        adjustments = adjustments_of(params, ids, self.tokenizer, form)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Request(
            next(self._ids),
            ids,
            params,
            seed,
            self.context_len,
            stop_ids,
            adjustments,
            cache_salt,
            priority,
            tenant,
            guide=self._guides.guide(form.source, stop_ids)
            if isinstance(form, HostGrammar)
            else None,
            shows=shows,
        )

    def form_of(self, params: SamplingParams) -> Form | None:
        """What the structure that `params` asks for compiles to; None if it asks for none.

        Raises RequestError for a structure that is refused.
        """
        structure = params.structure
        return None if structure is None else self._compiler.compile(Wish(*structure))

    def _check_ids(self, field: str, ids: tuple[int, ...]) -> None:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(field, f"must hold token ids, got {token!r}")
            if not 0 <= token < self.spec.vocab_size:
                raise RequestError(
                    field, f"token id {token} is outside the vocabulary of {self.spec.vocab_size}"
                )

    def _text_of(self, request: Request) -> TextStream:
        params = request.params
        decode = partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        return TextStream(
            decode, params.stops, params.include_stop_str_in_output, params.min_tokens
        )
