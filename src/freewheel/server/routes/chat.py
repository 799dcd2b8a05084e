# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: OpenAI's, with `reasoning_content` for models that think first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from freewheel.chat import Message
from freewheel.server.failures import ApiError
from freewheel.server.generation import Choice, Generation, Part
from freewheel.server.respond import Streamed, Whole, event
from freewheel.server.routes.shapes import new_id, now, usage_object
from freewheel.server.sampling import sampling_params, unsupported
from freewheel.server.schema import Choices, Count, ShortText, Strict, Text
from freewheel.server.scores import chat_logprobs, prompt_object
from freewheel.server.serving import Served, Serving
from freewheel.server.structure import ResponseFormat, structure_of

router = APIRouter()

MAX_MESSAGES = 4096


class TextPart(Strict):
    """The only kind of content: there are no images, sounds or files here."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(min_length=1, max_length=1024)]


class ChatMessage(Strict):
    """One turn. What an answer brought may be sent back as it came.

    The model's encoding leaves thoughts of earlier turns out, so `reasoning_content` is not read.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: ShortText | None = None
    reasoning_content: Text | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class TemplateSettings(Strict):
    """Whether the model thinks first; both names are in use."""

    thinking: bool | None = None
    enable_thinking: bool | None = None


class ChatRequest(Choices):
    """`max_completion_tokens` is OpenAI's new name for `max_tokens`; None runs to the end."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateSettings | None = None
    store: Literal[False] | None = None
    tags: Annotated[dict[ShortText, ShortText], Field(max_length=16)] | None = Field(
        default=None, alias="metadata"
    )
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, serving: Served) -> Response:
    """The next turn of a conversation, `n` times."""
    model = serving.check_model(body.model)
    _check_supported(body)
    limit = body.max_completion_tokens
    if limit is not None and body.max_tokens not in (None, limit):
        raise ApiError(400, "max_tokens: contradicts max_completion_tokens", param="max_tokens")
    limit = body.max_tokens if limit is None else limit
    structure = structure_of(body.structured_outputs, body.response_format)
    params = sampling_params(body, limit, {"logprobs": _logprobs(body)}, structure)
    prompt = await serving.converse(as_messages(body.messages), _thinks(body))
    field_name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    serving.check_room(prompt.ids, limit, f"messages {field_name}")
    head = {"id": new_id("chatcmpl"), "created": now(), "model": model}
    generation = serving.generate(
        [prompt.ids],
        params,
        body.n or 1,
        prompt.end_of_thought,
        structure,
        body.cache_salt,
        body.priority,
    )
    writer = _Writer(head, body, generation, serving, prompt.ids)
    if body.stream:
        return Streamed(generation, writer.events())
    return Whole(generation, writer.whole)


def as_messages(turns: Sequence[ChatMessage]) -> list[Message]:
    """The turns as the encoding takes them."""
    return [
        Message("system" if turn.role == "developer" else turn.role, plain(turn.content))
        for turn in turns
    ]


def plain(content: str | Sequence[TextPart]) -> str:
    """The text of a content, whichever way it was sent."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _check_supported(body: ChatRequest) -> None:
    """Raise ApiError 400 for what OpenAI's endpoint has and this one has not."""
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice")


def _logprobs(body: ChatRequest) -> int | None:
    """How many of the likeliest to report; None: not even the token's own."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
    return None


def _thinks(body: ChatRequest) -> bool:
    """Off unless asked for. The model has one way of thinking, so every effort but none is it."""
    settings = body.chat_template_kwargs
    if settings is not None:
        for value in (settings.thinking, settings.enable_thinking):
            if value is not None:
                return value
    return body.reasoning_effort not in (None, "none")


class _Writer:
    """The answer's JSON, whole or in events."""

    def __init__(
        self,
        head: dict[str, Any],
        body: ChatRequest,
        generation: Generation,
        serving: Serving,
        prompt: list[int],
    ) -> None:
        self._head, self._body, self._generation = head, body, generation
        self._prompt, self._spelling = prompt, serving.spelling

    def whole(self) -> dict[str, Any]:
        found = self._head | {"object": "chat.completion"}
        found["choices"] = [self._choice(choice) for choice in self._generation.choices]
        found["usage"] = usage_object(self._generation.usage)
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._prompt
        scores = self._generation.choices[0].prompt_logprobs
        if scores is not None:
            found["prompt_logprobs"] = prompt_object(self._spelling, scores)
        return found

    async def events(self) -> AsyncIterator[bytes]:
        head = self._head | {"object": "chat.completion.chunk"}
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        role = {"role": "assistant", "content": ""}
        for choice in self._generation.choices:
            opening = {"index": choice.index, "delta": role, "logprobs": None}
            yield event(head | {"choices": [opening | {"finish_reason": None}]})
        async for part in self._generation.parts():
            chunk = head | {"choices": [self._delta(part)]}
            if always:
                chunk["usage"] = usage_object(self._generation.usage)
            elif with_usage:
                chunk["usage"] = None
            yield event(chunk)
        if with_usage:
            usage = usage_object(self._generation.usage)
            yield event(head | {"choices": [], "usage": usage})
        yield event(b"[DONE]")

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thought:
            message["reasoning_content"] = choice.thoughts
        found: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(self._spelling, choice.logprobs),
            "finish_reason": choice.finish,
            "stop_reason": choice.stopped_by,
        }
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _delta(self, part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.thought:
            delta["reasoning_content"] = part.thought
        if part.said:
            delta["content"] = part.said
        found: dict[str, Any] = {
            "index": part.choice.index,
            "delta": delta,
            "logprobs": chat_logprobs(self._spelling, part.logprobs),
            "finish_reason": part.reading.finish,
            "stop_reason": part.reading.stopped_by,
        }
        if self._body.return_token_ids:
            found["token_ids"] = part.reading.token_ids
        if self._body.return_pieces:
            found["pieces"] = part.said_pieces
            found["reasoning_pieces"] = part.thought_pieces
        return found
