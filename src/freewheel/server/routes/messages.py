# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from freewheel.chat import Message
from freewheel.server.failures import ApiError
from freewheel.server.generation import Choice, Generation, Part, Usage
from freewheel.server.respond import Streamed, Whole, event, json_response
from freewheel.server.routes.chat import MAX_MESSAGES
from freewheel.server.routes.shapes import new_id
from freewheel.server.sampling import sampling_params, unsupported
from freewheel.server.schema import Count, Sampling, ShortText, StopText, Strict, Text
from freewheel.server.serving import Conversation, Served, Serving

router = APIRouter()


class CacheControl(Strict):
    """A hint. Every prompt is kept while there is room, so there is nothing to hint at."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(Strict):
    """Thoughts of an earlier turn, sent back. The model's encoding leaves them out."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


Blocks = Annotated[list[TextBlock | ThinkingBlock], Field(min_length=1, max_length=1024)]


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: Text | Blocks


class Thinking(Strict):
    """`adaptive` lets the model think, `enabled` for at most `budget_tokens` tokens."""

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class Asked(Strict):
    """What both endpoints take."""

    model: ShortText | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | Annotated[list[TextBlock], Field(max_length=256)] | None = None
    thinking: Thinking | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: dict[str, Any] | None = None


class Owner(Strict):
    user_id: ShortText | None = None


class MessagesRequest(Asked):
    """Anthropic's request, text only."""

    max_tokens: Annotated[Count, Field(ge=1)]
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    owner: Owner | None = Field(default=None, alias="metadata")
    service_tier: Literal["auto", "standard_only"] | None = None


@router.post("/v1/messages")
async def messages(body: MessagesRequest, serving: Served) -> Response:
    """The next turn of a conversation."""
    model = serving.check_model(body.model)
    prompt = await _conversation(body, serving)
    asked = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        thinking_token_budget=None if body.thinking is None else body.thinking.budget_tokens,
    )
    params = sampling_params(asked, body.max_tokens)
    serving.check_room(prompt.ids, body.max_tokens, "messages max_tokens")
    generation = serving.generate([prompt.ids], params, 1, prompt.end_of_thought)
    writer = _Writer(model, body.stop_sequences or [], generation)
    if body.stream:
        return Streamed(generation, writer.events(), anthropic=True)
    return Whole(generation, writer.whole)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Asked, serving: Served) -> Response:
    """How long the prompt would be."""
    serving.check_model(body.model)
    return json_response({"input_tokens": len((await _conversation(body, serving)).ids)})


async def _conversation(body: Asked, serving: Serving) -> Conversation:
    if body.tools or body.tool_choice:
        raise unsupported("tools")
    thinking = body.thinking
    if thinking is not None and (thinking.type == "enabled") != (
        thinking.budget_tokens is not None
    ):
        raise ApiError(
            400,
            "thinking.budget_tokens: goes with type enabled, and only with it",
            param="thinking",
        )
    system = [] if body.system is None else [Message("system", _plain(body.system))]
    turns = [Message(turn.role, _plain(turn.content)) for turn in body.messages]
    return await serving.converse(
        [*system, *turns], thinking is not None and thinking.type != "disabled"
    )


def _plain(content: str | Sequence[TextBlock | ThinkingBlock]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content if isinstance(block, TextBlock))


class _Writer:
    """The answer's JSON, whole or in events."""

    def __init__(self, model: str, stops: Sequence[str], generation: Generation) -> None:
        self._generation = generation
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": model}
        self._stops = stops
        self._block = -1
        self._kind = ""

    def whole(self) -> dict[str, Any]:
        (choice,) = self._generation.choices
        content: list[dict[str, Any]] = []
        if choice.thought:
            content.append({"type": "thinking", "thinking": choice.thoughts, "signature": ""})
        content.append({"type": "text", "text": choice.text})
        usage = _usage(self._generation.usage)
        return self._head | {"content": content} | self._ending(choice) | {"usage": usage}

    async def events(self) -> AsyncIterator[bytes]:
        (choice,) = self._generation.choices
        usage = _usage(self._generation.usage) | {"output_tokens": 0}
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _named({"type": "message_start", "message": self._head | nothing})
        async for part in self._generation.parts():
            for data in self._part_events(part):
                yield data
        if self._kind != "text":
            yield self._begin("text")
        yield _named({"type": "content_block_stop", "index": self._block})
        usage = _usage(self._generation.usage)
        ending = {"delta": self._ending(choice), "usage": usage}
        yield _named({"type": "message_delta"} | ending)
        yield _named({"type": "message_stop"})

    def _part_events(self, part: Part) -> list[bytes]:
        found: list[bytes] = []
        if part.thought:
            delta = {"type": "thinking_delta", "thinking": part.thought}
            found += self._delta("thinking", delta)
        if part.said:
            found += self._delta("text", {"type": "text_delta", "text": part.said})
        return found

    def _delta(self, kind: str, delta: dict[str, str]) -> list[bytes]:
        opening = [] if kind == self._kind else [self._begin(kind)]
        value = {"type": "content_block_delta", "index": self._block, "delta": delta}
        return [*opening, _named(value)]

    def _begin(self, kind: str) -> bytes:
        """Close the block before, if there is one, and open another."""
        closing = b""
        if self._block >= 0:
            closing = _named({"type": "content_block_stop", "index": self._block})
        self._block, self._kind = self._block + 1, kind
        block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        opening = {"type": "content_block_start", "index": self._block, "content_block": block}
        return closing + _named(opening)

    def _ending(self, choice: Choice) -> dict[str, Any]:
        if choice.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if choice.stopped_by is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_by}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "output_tokens": usage.completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
    }


def _named(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])
