# SPDX-License-Identifier: Apache-2.0
"""What OpenAI's Responses take: items of earlier answers and new ones, as turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from freewheel.chat import Message, ToolCall
from freewheel.server.routes.chat import MAX_MESSAGES
from freewheel.server.schema import Count, Priority, ShortText, Strict, Text
from freewheel.server.tools import (
    MAX_TOOLS,
    Calling,
    Chosen,
    Function,
    ToolName,
    calling_of,
    choice_kind,
)


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputMessage(Strict):
    """A turn; also an answer's message, sent back as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputText], Field(min_length=1, max_length=1024)]
    id: ShortText | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class CallItem(Strict):
    """A call of an earlier answer, sent back."""

    type: Literal["function_call"]
    call_id: ShortText
    name: ToolName
    arguments: Text
    id: ShortText | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class ResultItem(Strict):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: ShortText
    output: Text | Annotated[list[InputText], Field(min_length=1, max_length=1024)]
    id: ShortText | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class ThoughtText(Strict):
    type: Literal["reasoning_text"]
    text: Text


class ThoughtItem(Strict):
    """Thoughts of an earlier answer, sent back. The model's encoding says which it keeps."""

    type: Literal["reasoning"]
    id: ShortText | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    content: Annotated[list[ThoughtText], Field(max_length=1024)] | None = None
    encrypted_content: None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


def _kind(item: Any) -> str:
    """An item's type; a message need not say it."""
    found = item.get("type", "message") if isinstance(item, dict) else "message"
    return found if isinstance(found, str) else ""


Item = (
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ThoughtItem, Tag("reasoning")]
)
AnyItem = InputMessage | CallItem | ResultItem | ThoughtItem
Items = Annotated[
    list[
        Annotated[
            Item,
            Discriminator(
                _kind,
                custom_error_type="item_type",
                custom_error_message="type must be message, function_call, function_call_output "
                "or reasoning",
            ),
        ]
    ],
    Field(min_length=1, max_length=MAX_MESSAGES),
]


class ResponsesTool(Function):
    """A function, named without a level of its own."""

    type: Literal["function"]


class NamedItem(Strict):
    """A choice of one tool."""

    type: Literal["function"]
    name: ToolName


class AllowedItems(Strict):
    """A choice of some tools: the model is told of all, and may, or must, call these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedItem], Field(min_length=1, max_length=MAX_TOOLS)]


ItemChoice = Annotated[
    Annotated[NamedItem, Tag("NamedItem")] | Annotated[AllowedItems, Tag("AllowedItems")],
    choice_kind({"function": "NamedItem", "allowed_tools": "AllowedItems"}),
]


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Strict):
    format: TextFormat | None = None
    verbosity: None = None


class ResponsesRequest(Strict):
    """`store` must not be true, and nothing that a store would remember can be named."""

    model: ShortText | None = None
    input: Text | Items
    instructions: Text | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ItemChoice | Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    cache_salt: ShortText | None = None
    priority: Priority | None = None
    tags: Annotated[dict[ShortText, ShortText], Field(max_length=16)] | None = Field(
        default=None, alias="metadata"
    )
    service_tier: Literal["auto", "default"] | None = None


def turns_of(body: ResponsesRequest) -> list[Message]:
    system = [] if body.instructions is None else [Message("system", body.instructions)]
    if isinstance(body.input, str):
        return [*system, Message("user", body.input)]
    return [*system, *_joined(body.input)]


def _joined(items: Sequence[AnyItem]) -> list[Message]:
    """Items as turns: an assistant's thoughts, text and calls are one turn, whatever their order
    among themselves."""
    turns: list[Message] = []
    thoughts: str | None = None
    for item in items:
        if isinstance(item, ThoughtItem):
            thoughts = (thoughts or "") + "".join(part.text for part in item.content or ())
        elif isinstance(item, ResultItem):
            turns.append(Message("tool", _plain(item.output), call_id=item.call_id))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            turns.append(Message(role, _plain(item.content)))
        else:
            _answer(turns, item, thoughts)
            thoughts = None
    return turns


def _answer(turns: list[Message], item: InputMessage | CallItem, thoughts: str | None) -> None:
    """Add a part of an answer to the turn it belongs to."""
    text = _plain(item.content) if isinstance(item, InputMessage) else ""
    calls = ()
    if isinstance(item, CallItem):
        calls = (ToolCall(item.call_id, item.name, item.arguments),)
    last = turns[-1] if turns and turns[-1].role == "assistant" and thoughts is None else None
    if last is None or (text and last.content):
        turns.append(Message("assistant", text, thoughts, calls))
    else:
        turns[-1] = replace(last, content=last.content + text, calls=last.calls + calls)


def calling_of_response(body: ResponsesRequest) -> Calling:
    choice = body.tool_choice
    if isinstance(choice, AllowedItems):
        names = [one.name for one in choice.tools]
        chosen = Chosen(choice.mode, names, "tool_choice.tools")
    else:
        chosen = Chosen(f"function:{choice.name}" if isinstance(choice, NamedItem) else choice)
    return calling_of(body.tools or [], chosen, body.parallel_tool_calls)


def _plain(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
