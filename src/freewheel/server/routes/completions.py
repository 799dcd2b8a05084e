# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: OpenAI's, for prompts of text or of token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from freewheel.engine import Logprobs
from freewheel.server.choices import Choice, Part
from freewheel.server.failures import ApiError
from freewheel.server.generation import Generation, Talk
from freewheel.server.handoff import handing_of
from freewheel.server.respond import Streamed, Whole, event, json_response
from freewheel.server.routes.shapes import new_id, now, usage_object
from freewheel.server.sampling import sampling_params, unsupported
from freewheel.server.schema import MAX_PROMPTS, Choices, Count, ShortText, Text, TokenIds
from freewheel.server.scores import Offsets, completion_logprobs, joined, prompt_object
from freewheel.server.serving import Served, Serving
from freewheel.server.structure import structure_of

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class CompletionRequest(Choices):
    """`max_tokens` 0 needs `echo`: then the prompt alone comes back."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=128)] | None = None
    suffix: ShortText | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None


@dataclass(frozen=True)
class Prompts:
    """What is to be continued, and the text of it for `echo`."""

    ids: list[list[int]]
    texts: list[str]


@router.post("/v1/completions")
async def completions(body: CompletionRequest, serving: Served) -> Response:
    """Continue each prompt, `n` times."""
    model = serving.check_model(body.model)
    body.check_stream()
    if body.suffix:
        raise unsupported("suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    structure = structure_of(body.structured_outputs)
    extra = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        extra["prompt_logprobs"] = body.logprobs
    params = sampling_params(body, max_tokens or 1, extra, structure)
    if max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: must be at least 1 without echo", param="max_tokens")
    prompts = await _prompts(body.prompt, serving)
    for ids in prompts.ids:
        serving.check_room(ids, max_tokens or 1, "prompt max_tokens")
    handing = handing_of(body, serving, len(prompts.ids))
    head = {"id": new_id("cmpl"), "object": "text_completion", "created": now(), "model": model}
    head |= handing.told()
    if max_tokens == 0 and handing.handoff is not None:
        raise ApiError(400, "max_tokens: must be at least 1 in a handoff", param="max_tokens")
    if max_tokens == 0 and params.prompt_logprobs is None:
        return json_response(head | _echo_only(prompts, body.n or 1))
    generation = serving.generate(
        [Talk(ids) for ids in prompts.ids],
        params,
        body.n or 1,
        structure,
        body.cache_salt,
        body.priority,
        handoff=handing.handoff,
    )
    writer = _Writer(head, body, generation, serving, prompts)
    if body.stream:
        return Streamed(generation, writer.events())
    return Whole(generation, writer.whole)


async def _prompts(prompt: str | Sequence[Any], serving: Serving) -> Prompts:
    many = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    ids: list[list[int]] = []
    texts: list[str] = []
    for one in many:
        if isinstance(one, str):
            ids.append(await serving.encode(one))
            texts.append(one)
        else:
            serving.check_ids(one, "prompt")
            ids.append(list(one))
            texts.append(serving.tokenizer.decode(one))
    return Prompts(ids, texts)


def _echo_only(prompts: Prompts, n: int) -> dict[str, Any]:
    texts = [text for text in prompts.texts for _ in range(n)]
    choices = [
        {"index": index, "text": text, "logprobs": None, "finish_reason": "length"}
        for index, text in enumerate(texts)
    ]
    total = sum(map(len, prompts.ids))
    usage = {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total}
    return {"choices": choices, "usage": usage}


class _Writer:
    """The answer's JSON, whole or in events."""

    def __init__(
        self,
        head: dict[str, Any],
        body: CompletionRequest,
        generation: Generation,
        serving: Serving,
        prompts: Prompts,
    ) -> None:
        self._head, self._body, self._generation = head, body, generation
        texts = [text for text in prompts.texts for _ in range(body.n or 1)]
        self._echo = texts if body.echo else []
        self._begun: set[int] = set()
        self._scores = [_Scores(serving, body, text) for text in texts]

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in self._generation.choices]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        """A prompt's scores alone take a token that nobody asked for."""
        usage = self._generation.usage
        if self._body.max_tokens == 0:
            usage = replace(usage, completion=0, thought=0, accepted=0, rejected=0)
        return usage_object(usage)

    async def events(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        async for part in self._generation.parts():
            chunk = self._head | {"choices": [self._delta(part)]}
            if always:
                chunk["usage"] = self._usage()
            elif with_usage:
                chunk["usage"] = None
            yield event(chunk)
        if with_usage:
            usage = self._usage()
            yield event(self._head | {"choices": [], "usage": usage})
        yield event(b"[DONE]")

    def _choice(self, choice: Choice) -> dict[str, Any]:
        echo = self._echo[choice.index] if self._echo else ""
        alone = self._body.max_tokens == 0
        scores = self._scores[choice.index]
        found: dict[str, Any] = {
            "index": choice.index,
            "text": echo if alone else echo + choice.text,
            "logprobs": scores.first(choice, [] if alone else choice.logprobs),
            "finish_reason": "length" if alone else choice.finish,
            "stop_reason": None if alone else choice.stopped_by,
        }
        if self._body.return_token_ids:
            ids = [] if alone else choice.token_ids
            found |= {"token_ids": ids, "prompt_token_ids": choice.prompt}
        return found | scores.of_prompt(choice)

    def _delta(self, part: Part) -> dict[str, Any]:
        index, first = part.choice.index, part.choice.index not in self._begun
        self._begun.add(index)
        echo = self._echo[index] if self._echo and first else ""
        alone, scores = self._body.max_tokens == 0, self._scores[index]
        own = () if alone else part.logprobs
        found: dict[str, Any] = {
            "index": index,
            "text": echo if alone else echo + part.said,
            "logprobs": scores.first(part.choice, own) if first else scores.more(own),
            "finish_reason": "length" if alone else part.reading.finish,
            "stop_reason": None if alone else part.reading.stopped_by,
        }
        if self._body.return_token_ids:
            found["token_ids"] = () if alone else part.reading.token_ids
            found["prompt_token_ids"] = part.choice.prompt if first else None
        if self._body.return_pieces:
            found["pieces"] = [] if alone else part.said_pieces
        return found | (scores.of_prompt(part.choice) if first else {})


class _Scores:
    """One choice's log-probabilities, with their places in its text."""

    def __init__(self, serving: Serving, body: CompletionRequest, prompt: str) -> None:
        self._spelling, self._asked = serving.spelling, body.logprobs is not None
        self._echoes, self._shows_prompt = bool(body.echo), body.prompt_logprobs is not None
        start = len(prompt) if body.echo else 0
        self._prompt = prompt
        self._offsets = Offsets(self._spelling, start, body.skip_special_tokens is False)

    def first(self, choice: Choice, scores: Sequence[Logprobs]) -> dict[str, Any] | None:
        """With the prompt's, if it is echoed."""
        own = self.more(scores)
        if own is None or not self._echoes or choice.prompt_logprobs is None:
            return own
        places = Offsets(self._spelling, 0, False)
        offsets = [places.next_in(self._prompt, token) for token in choice.prompt]
        echoed = completion_logprobs(self._spelling, choice.prompt, choice.prompt_logprobs, offsets)
        return joined(echoed, own)

    def more(self, scores: Sequence[Logprobs]) -> dict[str, Any] | None:
        """Of these tokens; None if nobody asked."""
        if not self._asked:
            return None
        tokens = [one.token_id for one in scores]
        offsets = [self._offsets.next(token) for token in tokens]
        return completion_logprobs(self._spelling, tokens, scores, offsets)

    def of_prompt(self, choice: Choice) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`, if asked for."""
        if not self._shows_prompt or choice.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_object(self._spelling, choice.prompt_logprobs)}
