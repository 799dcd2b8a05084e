# SPDX-License-Identifier: Apache-2.0
"""What every route needs: the model's text side, the line to the engine, and the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, cast

from fastapi import Depends, Request

from freewheel.chat import Ask, Chat, Message
from freewheel.engine import Tokenizer
from freewheel.errors import RequestError, StartError, UnsupportedModel
from freewheel.server.failures import ApiError, draining, ending, not_ready, too_long
from freewheel.server.generation import Generation, Talk, Terms
from freewheel.server.held import structure_of_calls
from freewheel.server.link import Link
from freewheel.server.metrics import ServerMetrics
from freewheel.server.recent import Recent
from freewheel.server.scores import Spelling
from freewheel.server.settings import ServerSettings
from freewheel.server.structure import Structure
from freewheel.server.tickets import Ticket
from freewheel.server.tools import Calling
from freewheel.server.wire import Step
from freewheel.spec import FinishReason, Handoff, SamplingParams
from freewheel.spec.picks import PickedLayers

LONG_TEXT = 1 << 14
"""Characters from which on a text is encoded in a thread: others must not wait for it."""


@dataclass
class Serving:
    """One model, served. `draining`: no new requests; `ending`: nor ever again."""

    tokenizer: Tokenizer
    chat: Chat | UnsupportedModel
    vocab_size: int
    link: Link
    settings: ServerSettings
    metrics: ServerMetrics
    picked: PickedLayers = field(default_factory=PickedLayers)
    recent: Recent = field(default_factory=Recent)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    ending: bool = False
    traced: Callable[[Ticket, FinishReason], None] = lambda *_: None
    spelling: Spelling = field(init=False)

    def __post_init__(self) -> None:
        self.spelling = Spelling(self.tokenizer, self.vocab_size)
        self.link.on_round, self.link.on_step = self.recent.round, self._note
        self.link.on_end = self._end

    def _end(self, ticket: Ticket, reason: FinishReason) -> None:
        self.metrics.end(ticket, reason)
        self.traced(ticket, reason)

    def _note(self, ticket: Ticket, step: Step, before: float) -> None:
        self.metrics.step(ticket, step, before)
        self.recent.step(ticket, step, before)

    def closed(self) -> ApiError | None:
        """What new requests are told while none is taken."""
        if self.ending:
            return ending()
        return draining() if self.draining else None

    @property
    def context_len(self) -> int:
        """Tokens of prompt and answer together. Raises ApiError 503 until the engine said it."""
        if self.link.ready is None:
            raise not_ready(f"the engine is {self.link.state}")
        return self.link.ready.context_len

    @property
    def kv_port(self) -> int:
        """Where other engines ask for computed prompts. Raises ApiError 503 as `context_len`."""
        if self.link.ready is None:
            raise not_ready(f"the engine is {self.link.state}")
        return self.link.ready.kv_port

    def check_model(self, name: str | None) -> str:
        """The served name. Raises ApiError 404 for any other."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"model: {name!r} is not served here; {self.settings.model_name!r} is",
                param="model",
                code="model_not_found",
            )
        return self.settings.model_name

    async def encode(self, text: str, param: str = "prompt") -> list[int]:
        """A prompt's ids. Raises ApiError 400 for what is not text."""
        try:
            if len(text) < LONG_TEXT:
                return self.tokenizer.encode_prompt(text)
            return await asyncio.to_thread(self.tokenizer.encode_prompt, text)
        except RequestError as error:
            raise ApiError(400, str(error), param=param) from error

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Of each token alone."""

        def each() -> list[str]:
            return [self.tokenizer.decode([one], False) for one in ids]

        # Long before a text has as many tokens as characters, others would wait for it.
        return each() if len(ids) < LONG_TEXT // 16 else await asyncio.to_thread(each)

    async def converse(
        self, messages: Sequence[Message], ask: Ask, calling: Calling, param: str = "messages"
    ) -> Talk:
        """The prompt for the next turn. Raises ApiError 400 if the model has no such encoding."""
        if isinstance(self.chat, UnsupportedModel):
            raise ApiError(400, str(self.chat), param=param, code="unsupported")
        chat = self.chat
        try:
            if chat.in_process and sum(len(one.content) for one in messages) < LONG_TEXT:
                prompt = chat.prompt(messages, ask)
            else:
                prompt = await asyncio.to_thread(chat.prompt, messages, ask)
        except RequestError as error:
            field = param if error.field in ("messages", "prompt") else error.field
            message = str(error).removeprefix(f"{error.field}: ")
            raise ApiError(400, f"{field}: {message}", param=field) from error
        except UnsupportedModel as error:
            raise ApiError(400, str(error), param=param, code="unsupported") from error
        except StartError as error:
            raise not_ready(str(error)) from error
        thought = (prompt.end_of_thought, prompt.start_of_thought)
        if not calling.offered:
            return Talk(prompt.ids, *thought)
        parser = partial(chat.parser, calling.callable, calling.at_most, calling.forced)
        return Talk(prompt.ids, *thought, parser, chat.markup_ids)

    def hold(
        self, calling: Calling, other: Structure | None = None, budgeted: bool = False
    ) -> Structure | None:
        """What the answer is held to (`structure_of_calls`)."""
        markup = None if isinstance(self.chat, UnsupportedModel) else self.chat.markup
        tokens = self.tokenizer.control_tokens
        return structure_of_calls(calling, markup, tokens, other, budgeted)

    def close(self) -> None:
        """End what was started beside the engine."""
        if isinstance(self.chat, Chat):
            self.chat.close()

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Raise ApiError 400 for an id that the model does not have."""
        for token in ids:
            if token >= self.vocab_size:
                raise ApiError(
                    400,
                    f"{param}: token id {token} is outside the vocabulary of {self.vocab_size}",
                    param=param,
                )

    def check_room(self, prompt: Sequence[int], max_tokens: int | None, names: str) -> None:
        """Raise ApiError 400 unless prompt and answer fit. `names`: the two fields to blame."""
        param, _, limit_name = names.partition(" ")
        context_len = self.context_len
        room = context_len - len(prompt)
        if not prompt:
            raise ApiError(400, f"{param}: is empty; it needs at least one token", param=param)
        if room < 1:
            raise too_long(len(prompt), context_len, param)
        if max_tokens is not None and max_tokens > room:
            raise ApiError(
                400,
                f"{limit_name}: {max_tokens} asked for, but with a prompt of {len(prompt)} tokens "
                f"a context of {context_len} has room for {room}",
                param=limit_name,
                code="context_length_exceeded",
            )

    def generate(
        self,
        prompts: Sequence[Talk],
        params: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        structure: Structure | Sequence[Structure | None] | None = None,
        cache_salt: str | None = None,
        priority: int | None = None,
        shows: bool = False,
        handoff: Handoff | None = None,
    ) -> Generation:
        """Begin. `params`, `structure`: of all prompts, or one for each. `shows`: with what the
        prompt's last token picks; `handoff`: of the one prompt, which has one answer.

        Raises ApiError 429 and 503.
        """
        given = (prompts, params, n, structure)
        terms = Terms(cache_salt or "", priority or 0, shows, handoff)
        try:
            return Generation(self.link, self.tokenizer, *given, terms=terms)
        except ApiError as error:
            self.metrics.rejected(error.code or "error")
            raise


def serving_of(request: Request) -> Serving:
    """The application's."""
    return cast("Serving", request.app.state.serving)


Served = Annotated[Serving, Depends(serving_of)]
