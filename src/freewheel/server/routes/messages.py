# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from freewheel.chat import Ask, CallBegun, CallDelta, Content, Event, Message, ToolCall
from freewheel.server.failures import ApiError
from freewheel.server.generation import Call, Choice, Generation, Part, Talk, Usage
from freewheel.server.respond import Streamed, Whole, event, json_response, to_json
from freewheel.server.routes.chat import MAX_MESSAGES
from freewheel.server.routes.shapes import new_id
from freewheel.server.sampling import sampling_params
from freewheel.server.schema import Count, Sampling, ShortText, StopText, Strict, Text
from freewheel.server.serving import Served, Serving
from freewheel.server.tools import (
    MAX_TOOLS,
    Calling,
    Description,
    Function,
    ToolName,
    calling_of,
)

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


class Caller(Strict):
    """Who called: the model itself."""

    type: Literal["direct"]


class ThinkingBlock(Strict):
    """Thoughts of an earlier turn, sent back. The model's encoding says which it keeps."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(Strict):
    """A call of an earlier turn, sent back."""

    type: Literal["tool_use"]
    id: ShortText
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Caller | None = None


class ToolResultBlock(Strict):
    """What a call brought. The encodings have no mark for errors: the content must say it."""

    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: Text | Annotated[list[TextBlock], Field(max_length=1024)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
Blocks = Annotated[list[Block], Field(min_length=1, max_length=1024)]


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: Text | Blocks


class Thinking(Strict):
    """`adaptive` lets the model think, `enabled` for at most `budget_tokens` tokens."""

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputSettings(Strict):
    """How hard a model that thinks is to think."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ClaudeTool(Strict):
    """A tool by Anthropic's names."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Description | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Strict):
    """`name` goes with type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Asked(Strict):
    """What both endpoints take."""

    model: ShortText | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | Annotated[list[TextBlock], Field(max_length=256)] | None = None
    thinking: Thinking | None = None
    output_config: OutputSettings | None = None
    tools: Annotated[list[ClaudeTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None


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
    calling = _calling(body)
    talk = await _conversation(body, serving, calling)
    asked = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        thinking_token_budget=None if body.thinking is None else body.thinking.budget_tokens,
    )
    structure = serving.hold(calling, None, asked.thinking_token_budget is not None)
    params = sampling_params(asked, body.max_tokens, structure=structure)
    serving.check_room(talk.ids, body.max_tokens, "messages max_tokens")
    generation = serving.generate([talk], params, 1, structure)
    writer = _Writer(model, body.stop_sequences or [], generation)
    if body.stream:
        return Streamed(generation, writer.events(), anthropic=True)
    return Whole(generation, writer.whole)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Asked, serving: Served) -> Response:
    """How long the prompt would be."""
    serving.check_model(body.model)
    talk = await _conversation(body, serving, _calling(body))
    return json_response({"input_tokens": len(talk.ids)})


def _calling(body: Asked) -> Calling:
    """The tools. Raises ApiError 400."""
    functions = [
        Function(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        for tool in body.tools or []
    ]
    choice = body.tool_choice
    if choice is None:
        return calling_of(functions, None)
    if (choice.type == "tool") != (choice.name is not None):
        raise ApiError(
            400, "tool_choice.name: goes with type tool, and only with it", param="tool_choice"
        )
    named = {"any": "required", "tool": f"function:{choice.name}"}
    parallel = not choice.disable_parallel_tool_use
    return calling_of(functions, named.get(choice.type, choice.type), parallel)


async def _conversation(body: Asked, serving: Serving, calling: Calling) -> Talk:
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
    turns = [one for turn in body.messages for one in _messages(turn)]
    ask = Ask(
        thinking=thinking is not None and thinking.type != "disabled",
        effort=None if body.output_config is None else body.output_config.effort,
        tools=calling.offered,
    )
    return await serving.converse([*system, *turns], ask, calling)


def _messages(turn: Turn) -> list[Message]:
    """One turn of Anthropic's: results of calls are turns of their own to everybody else."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    results = [block for block in turn.content if isinstance(block, ToolResultBlock)]
    others = [b for b in turn.content if isinstance(b, ThinkingBlock | ToolUseBlock)]
    wrong = others if turn.role == "user" else results
    if wrong:
        message = f"messages: a turn of role {turn.role} cannot have a {wrong[0].type} block"
        raise ApiError(400, message, param="messages", code="invalid_value")
    if turn.role == "user":
        found = [
            Message("tool", _plain(one.content or ""), call_id=one.tool_use_id) for one in results
        ]
        return [*found, Message("user", _plain(texts))] if texts or not found else found
    thoughts = [block.thinking for block in others if isinstance(block, ThinkingBlock)]
    calls = tuple(
        ToolCall(block.id, block.name, to_json(block.input).decode())
        for block in others
        if isinstance(block, ToolUseBlock)
    )
    return [Message("assistant", _plain(texts), "".join(thoughts) or None, calls)]


def _plain(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


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
        for block in choice.blocks:
            if isinstance(block, Call):
                content.append(_tool_use(block) | {"input": block.values})
            else:
                content.append({"type": "text", "text": block.text})
        if not choice.blocks:
            content.append(_EMPTY)
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
        if self._kind in ("", "thinking"):
            yield self._begin("text", _EMPTY)
        yield _named({"type": "content_block_stop", "index": self._block})
        usage = _usage(self._generation.usage)
        ending = {"delta": self._ending(choice), "usage": usage}
        yield _named({"type": "message_delta"} | ending)
        yield _named({"type": "message_stop"})

    def _part_events(self, part: Part) -> list[bytes]:
        found: list[bytes] = []
        if part.thought:
            if self._kind != "thinking":
                block = {"type": "thinking", "thinking": "", "signature": ""}
                found.append(self._begin("thinking", block))
            found.append(self._delta({"type": "thinking_delta", "thinking": part.thought}))
        for one in part.told.events:
            found += self._said(one, part.choice)
        return found

    def _said(self, one: Event, choice: Choice) -> list[bytes]:
        """One event of the answer. Text around calls gets blocks of its own."""
        if isinstance(one, CallBegun):
            block = _tool_use(choice.calls[one.index]) | {"input": {}}
            return [self._begin("tool_use", block)]
        if isinstance(one, CallDelta):
            return [self._delta({"type": "input_json_delta", "partial_json": one.text})]
        if not isinstance(one, Content):
            return []
        opening = [] if self._kind == "text" else [self._begin("text", _EMPTY)]
        return [*opening, self._delta({"type": "text_delta", "text": one.text})]

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _named({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """Close the block before, if there is one, and open another."""
        closing = b""
        if self._block >= 0:
            closing = _named({"type": "content_block_stop", "index": self._block})
        self._block, self._kind = self._block + 1, kind
        opening = {"type": "content_block_start", "index": self._block, "content_block": block}
        return closing + _named(opening)

    def _ending(self, choice: Choice) -> dict[str, Any]:
        if choice.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if choice.stopped_by is not None and choice.finish_reason != "tool_calls":
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_by}
        called = choice.finish_reason == "tool_calls"
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


_EMPTY = {"type": "text", "text": ""}


def _tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call.key}", "name": call.name}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "output_tokens": usage.completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
    }


def _named(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])
