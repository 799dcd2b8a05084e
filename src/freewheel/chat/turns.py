# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation, the tools it may use, and what is asked of the next turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from freewheel.errors import RequestError

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def as_function(self) -> dict[str, Any]:
        """OpenAI's function object, without what was not said."""
        found: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            found["description"] = self.description
        if self.parameters is not None:
            found["parameters"] = dict(self.parameters)
        return found


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments`: JSON text of an object; in an answer that was cut, its beginning."""

    id: str
    name: str
    arguments: str

    def values(self) -> dict[str, Any]:
        """The arguments. Raises RequestError if they are no JSON object."""
        try:
            found = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(
                "messages", f"the arguments of call {self.id!r} are not JSON: {error}"
            ) from error
        if not isinstance(found, dict):
            raise RequestError("messages", f"the arguments of call {self.id!r} are no JSON object")
        return found


@dataclass(frozen=True)
class Message:
    """One turn. `reasoning` and `calls` are an assistant's; `call_id` says what a tool answers."""

    role: Role
    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True)
class Ask:
    """What the next turn may do.

    `effort` None: the encoding's own default. `keep_thoughts` None: the encoding's own rule for
    thoughts of earlier turns; a value is for encodings that let one choose. `continues`: the last
    message is the model's own, and what is asked for is the rest of it.
    """

    thinking: bool = False
    effort: Effort | None = None
    tools: tuple[Tool, ...] = ()
    keep_thoughts: bool | None = None
    continues: bool = False


def open_turn(messages: Sequence[Message]) -> Message:
    """The last turn, if it can go on.

    Raises RequestError if it is not the model's own, is empty, or has called tools already.
    """
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        raise RequestError("messages", "must end with an assistant turn, for that is to go on")
    if last.calls:
        raise RequestError("messages", "the last turn is to go on, but it ends in calls of tools")
    if not last.content and not last.reasoning:
        raise RequestError("messages", "the last turn is to go on, but it is empty")
    return last


def checked(messages: Sequence[Message]) -> list[Message]:
    """The turns, with the results of each turn's calls in the order of the calls.

    Raises RequestError if the last turn is nobody's question, or if calls and results do not match:
    each call has exactly one result before anything else is said.
    """
    if not messages or messages[-1].role not in ("user", "tool"):
        own = bool(messages) and messages[-1].role == "assistant"
        hint = "; continue_final_message goes on with the model's own" if own else ""
        raise RequestError("messages", f"must end with a user turn or a tool's result{hint}")
    found: list[Message] = []
    at = 0
    while at < len(messages):
        turn, at = messages[at], at + 1
        if turn.role == "tool":
            raise RequestError(
                "messages", f"turn {at} is a result of call {turn.call_id!r}, which nobody made"
            )
        found.append(turn)
        if turn.calls:
            results = _results(turn, messages[at : at + len(turn.calls)], at)
            found, at = found + results, at + len(results)
    return found


def alternating(messages: Sequence[Message]) -> list[Message]:
    """`checked` turns in which a system turn comes first or not at all, and the others alternate.

    Raises RequestError otherwise: the encoding has no way to write such turns.
    """
    found = checked(messages)
    turns = found[1:] if found[0].role == "system" else found
    expected = "user"
    for index, turn in enumerate(turns):
        if turn.role == "tool":
            continue
        after_tools = index > 0 and turns[index - 1].role == "tool"
        if turn.role != expected and not (after_tools and turn.role in ("user", "assistant")):
            raise RequestError(
                "messages", f"turn {index + 1} is {turn.role!r}: user and assistant must alternate"
            )
        expected = "assistant" if turn.role == "user" else "user"
    return found


def _results(turn: Message, results: Sequence[Message], at: int) -> list[Message]:
    ids = [call.id for call in turn.calls]
    if len(set(ids)) < len(ids):
        raise RequestError("messages", f"turn {at} has two calls with one id")
    for call in turn.calls:
        call.values()
    by_id = {one.call_id: one for one in results if one.role == "tool"}
    for one in ids:
        if one not in by_id:
            raise RequestError("messages", f"call {one!r} of turn {at} has no result behind it")
    return [replace(by_id[one], call_id=one) for one in ids]
