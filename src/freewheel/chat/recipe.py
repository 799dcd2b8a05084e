# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's encoding, by DeepSeek's own library `deepseek-recipe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV4Encoding,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)

from freewheel.chat.pieces import Piece

if TYPE_CHECKING:
    from deepseek_recipe._native import ReasoningEffort

EFFORTS: dict[str | None, ReasoningEffort | None] = {
    None: None,
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}
"""The library's name of each effort, as it reads requests itself."""


def render(given: Mapping[str, Any]) -> list[Piece]:
    """Pieces of the prompt for the next turn."""
    conversation = Conversation(
        [_message(one) for one in given["messages"]],
        thinking_mode=given["thinking"],
        tools=[_tool(one) for one in given["tools"]] or None,
        reasoning_effort=EFFORTS[given["effort"]],
    )
    rendered = DeepseekV4Encoding().render_conversation(conversation)
    return _pieces(rendered.prompt, rendered.special_ranges)


def _pieces(prompt: str, ranges: Sequence[tuple[int, int]]) -> list[Piece]:
    pieces: list[Piece] = []
    at = 0
    for begin, end in ranges:
        pieces += [(prompt[at:begin], False), (prompt[begin:end], True)]
        at = end
    return [piece for piece in [*pieces, (prompt[at:], False)] if piece[0]]


def _message(turn: Mapping[str, Any]) -> Message:
    role, content = turn["role"], turn["content"]
    if role == "system":
        return SystemMessage(content)
    if role == "user":
        return UserMessage(content)
    if role == "tool":
        return ToolMessage(content, turn["call_id"])
    calls = [ToolCall(one["id"], one["name"], one["arguments"]) for one in turn["calls"]]
    return AssistantMessage(content, turn["reasoning"], calls or None)


def _tool(tool: Mapping[str, Any]) -> ToolDefinition:
    return ToolDefinition(tool["name"], tool.get("description"), tool.get("parameters"))
