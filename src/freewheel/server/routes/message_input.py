# SPDX-License-Identifier: Apache-2.0
"""What Anthropic's Messages take: turns of blocks, as everybody else's turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from freewheel.chat import Message, ToolCall
from freewheel.server.failures import ApiError
from freewheel.server.respond import to_json
from freewheel.server.routes.chat import MAX_MESSAGES
from freewheel.server.schema import Count, ShortText, StopText, Strict, Text
from freewheel.server.tools import (
    MAX_TOOLS,
    Calling,
    Chosen,
    Description,
    Function,
    ToolName,
    calling_of,
)


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


def calling_of_message(body: Asked) -> Calling:
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
        return calling_of(functions, Chosen())
    if (choice.type == "tool") != (choice.name is not None):
        raise ApiError(
            400,
            "tool_choice.name: goes with type tool, and only with it",
            param="tool_choice.name",
        )
    named = {"any": "required", "tool": f"function:{choice.name}"}
    parallel = not choice.disable_parallel_tool_use
    return calling_of(functions, Chosen(named.get(choice.type, choice.type)), parallel)


def turns_of(turn: Turn) -> list[Message]:
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
            Message("tool", plain_text(one.content or ""), call_id=one.tool_use_id)
            for one in results
        ]
        return [*found, Message("user", plain_text(texts))] if texts or not found else found
    thoughts = [block.thinking for block in others if isinstance(block, ThinkingBlock)]
    calls = tuple(
        ToolCall(block.id, block.name, to_json(block.input).decode())
        for block in others
        if isinstance(block, ToolUseBlock)
    )
    return [Message("assistant", plain_text(texts), "".join(thoughts) or None, calls)]


def plain_text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
