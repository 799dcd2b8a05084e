# SPDX-License-Identifier: Apache-2.0
"""Tools that an answer may call: what a request says of them, bounded and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from freewheel.chat import Tool
from freewheel.server.failures import ApiError
from freewheel.server.schema import ShortText, Strict, Text

MAX_TOOLS = 128
MAX_CALLS = 128
"""Calls of one turn."""
MAX_SCHEMA = 1 << 16
"""Characters of one tool's parameters, as JSON."""
MAX_SCHEMAS = 1 << 20
"""Of all of them together."""
MAX_SCHEMA_DEPTH = 64

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Description = Annotated[str, StringConstraints(max_length=1 << 16)]


class Function(Strict):
    """OpenAI's function. `strict`: a call of it is held to its schema, whoever chose to call."""

    name: ToolName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: ToolName


class NamedTool(Strict):
    """A choice of one tool, in a chat."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(Strict):
    """`mode` auto: one of `tools` may be called; required: one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    """A choice of some tools, in a chat: the model is told of all, and may call these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def choice_kind(kinds: Mapping[str, str]) -> Discriminator:
    """Which of several classes, by the `type` of an object: the one whose errors are told."""

    def kind(value: Any) -> str | None:
        given = value.get("type") if isinstance(value, dict) else None
        return kinds.get(given) if isinstance(given, str) else None

    words = f"must be none, auto or required, or an object whose type is {' or '.join(kinds)}"
    return Discriminator(kind, custom_error_type="tool_choice", custom_error_message=words)


ToolChoice = Annotated[
    Annotated[NamedTool, Tag("NamedTool")] | Annotated[AllowedTools, Tag("AllowedTools")],
    choice_kind({"function": "NamedTool", "allowed_tools": "AllowedTools"}),
]
"""In a chat; a choice by a word stands beside it."""


class CalledFunction(Strict):
    name: ToolName
    arguments: Text


class CalledTool(Strict):
    """A call of an earlier turn, sent back."""

    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None


@dataclass(frozen=True)
class Calling:
    """Which tools an answer may call.

    `choice`: "none", "auto", "required" or "function:" and a name. `strict`: names of tools whose
    calls are held to their schemas even if the model need not call. `parallel` False: one call.
    `allowed`: names of those that may be called; None: all.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Tools that the model is told of."""
        return () if self.choice == "none" else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Of these, the tools that may be called."""
        if self.allowed is None:
            return self.offered
        return tuple(one for one in self.offered if one.name in self.allowed)

    @property
    def held(self) -> bool:
        """Whether what may stand in a call is more than the model's own business."""
        return self.forced or bool(self.strict) or len(self.callable) < len(self.offered)

    @property
    def at_most(self) -> int | None:
        """Calls in one answer."""
        return None if self.parallel else 1

    @property
    def forced(self) -> bool:
        """There must be a call."""
        return self.choice not in ("none", "auto")


@dataclass(frozen=True)
class Chosen:
    """A client's choice among its tools, in `Calling`'s words. `where`: how the client calls the
    list of `allowed` names."""

    choice: str | None = None
    allowed: Sequence[str] | None = None
    where: str = "tool_choice"


def calling_of(
    functions: Sequence[Function], chosen: Chosen, parallel: bool | None = None
) -> Calling:
    """Tools and the choice among them, checked. Raises ApiError 400, naming the field."""
    tools: list[Tool] = []
    size = 0
    for place, one in enumerate(functions):
        where = f"tools.{place}"
        if any(one.name == tool.name for tool in tools):
            raise _refused(where, f"{one.name!r} is defined twice")
        if one.parameters is not None:
            size += _check_schema(one.parameters, where)
        tools.append(Tool(one.name, one.description, one.parameters))
    if size > MAX_SCHEMAS:
        raise _refused("tools", f"{size} characters of schemas; at most {MAX_SCHEMAS}")
    names = {tool.name for tool in tools}
    for place, name in enumerate(chosen.allowed or ()):
        if name not in names:
            where = f"{chosen.where}.{place}"
            raise _refused(where, f"{name!r} is not among the tools")
    allowed = None if chosen.allowed is None else frozenset(chosen.allowed)
    strict = frozenset(one.name for one in functions if one.strict)
    found = Calling(tuple(tools), chosen.choice or "auto", parallel is not False, strict, allowed)
    if found.forced and not tools:
        raise _refused("tool_choice", "asks for a call, but there are no tools")
    name = found.choice.removeprefix("function:")
    if name != found.choice and name not in names:
        raise _refused("tool_choice", f"{name!r} is not among the tools")
    return found


def choice_of(choice: str | NamedTool | AllowedTools | None) -> Chosen:
    """OpenAI's choice in a chat."""
    if isinstance(choice, AllowedTools):
        names = [one.function.name for one in choice.allowed_tools.tools]
        return Chosen(choice.allowed_tools.mode, names, "tool_choice.allowed_tools.tools")
    return Chosen(f"function:{choice.function.name}" if isinstance(choice, NamedTool) else choice)


def _check_schema(schema: Mapping[str, Any], where: str) -> int:
    """Its size in bytes. Raises ApiError 400 for one too large or too deep."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inside = [one for one in level if isinstance(one, dict | list)]
        level = [
            part for one in inside for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            break
    else:
        raise _refused(f"{where}.parameters", f"are nested deeper than {MAX_SCHEMA_DEPTH} levels")
    size = len(json.dumps(schema, ensure_ascii=False))
    if size > MAX_SCHEMA:
        raise _refused(
            f"{where}.parameters", f"have {size} characters; at most {MAX_SCHEMA} are read"
        )
    return size


def _refused(field: str, message: str) -> ApiError:
    return ApiError(400, f"{field}: {message}", param=field, code="invalid_value")
