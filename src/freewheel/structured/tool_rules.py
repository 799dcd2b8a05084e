# SPDX-License-Identifier: Apache-2.0
"""The parts of a grammar of tool calls, tool by tool (`structured.tree`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from freewheel.errors import RequestError
from freewheel.structured.lark import raw_texts
from freewheel.structured.tool_schemas import Arguments, arguments_of, check_text, kept, only_text
from freewheel.structured.tree import (
    ANY_TEXT,
    Node,
    Splitter,
    either,
    free,
    json_of,
    many,
    maybe,
    row,
    rule,
    said,
    until,
    word,
)

if TYPE_CHECKING:
    from freewheel.structured.tools import Tool, ToolFormat

_KEY = re.compile(r"[^\"<>\\\x00-\x1f]{1,256}")
_ANY_KEY = "[A-Za-z_][A-Za-z0-9_]*"


class ToolRules:
    """`rules` grow with each tool; the callers of its methods put them together."""

    def __init__(self, fmt: ToolFormat, control_tokens: Mapping[str, int]) -> None:
        self.rules: dict[str, Node] = {}
        self._fmt = fmt
        self._splitter = Splitter(control_tokens)
        opening = self._splitter.parts(fmt.opening)
        self.mark = next((part for part in opening if isinstance(part, int)), None)
        """The first control token of what opens calls."""

    def add(self, number: int, tool: Tool) -> None:
        """The rules of one tool's call: whole, and without the format's opening."""
        fmt, name = self._fmt, f"call{number}"
        arguments = self._arguments(kept(tool.name, tool.parameters))
        self.rules[f"{name}_body"] = row(arguments, self._said(fmt.call_end))
        head = f"{fmt.call_begin}{tool.name}{fmt.name_end}"
        self.rules[name] = row(self._said(head), rule(f"{name}_body"))
        rest = f"{fmt.begin}{head}"[len(fmt.opening) :]
        self.rules[f"{name}_rest"] = row(self._said(rest), rule(f"{name}_body"))

    def close(self, count: int) -> None:
        """The rules for any of `count` tools."""
        self.rules["call"] = either(*(rule(f"call{n}") for n in range(count)))
        self.rules["opened"] = either(*(rule(f"call{n}_rest") for n in range(count)))

    def at_once(self, parallel: bool) -> Node:
        """Calls and nothing else."""
        return row(self._said(self._fmt.begin), self._calls("call", parallel))

    def behind_mark(self, parallel: bool) -> Node:
        """What follows the mark."""
        parts = self._splitter.parts(self._fmt.opening)
        assert self.mark is not None
        rest = parts[parts.index(self.mark) + 1 :]
        return row(said(rest), self._calls("opened", parallel))

    def behind_text(self, parallel: bool) -> Node:
        """Text, and perhaps calls behind it. Without a control token, no text holds the opening."""
        opening = self._splitter.parts(self._fmt.opening)
        outside = free(self._fmt.opening if self.mark is None else "")
        return either(outside, row(until(ANY_TEXT, opening), self._calls("opened", parallel)))

    def _said(self, text: str) -> Node:
        return said(self._splitter.parts(text))

    def _calls(self, first: str, parallel: bool) -> Node:
        more = [many(row(self._said(self._fmt.between), rule("call")))] if parallel else []
        return row(rule(first), *more, self._said(self._fmt.end))

    def _arguments(self, schema: Mapping[str, Any] | None) -> Node:
        if not self._fmt.key_begin:
            return json_of(_closed(schema), {})
        if schema is None:
            return many(self._argument(None, True, {}))
        ways = [self._listed(one, schema) for one in arguments_of(schema)]
        return ways[0] if len(ways) == 1 else either(*ways)

    def _listed(self, given: Arguments, root: Mapping[str, Any]) -> Node:
        """One argument behind another, in the order of the schema."""
        for key in (*given.properties, *given.required):
            if not _KEY.fullmatch(key):
                raise RequestError("tools", f"has an argument {key!r}, which cannot be written")
            if key not in given.properties:
                raise RequestError("tools", f"requires {key!r}, which is not among its properties")
        found = {key: self._argument(key, one, root) for key, one in given.properties.items()}
        needed = (one if key in given.required else maybe(one) for key, one in found.items())
        return row(*needed)

    def _argument(self, key: str | None, schema: Any, root: Mapping[str, Any]) -> Node:
        """Its key (None: any), and a string as it is or another value as JSON."""
        fmt, ways = self._fmt, list[Node]()
        check_text(schema, f"#/properties/{key}")
        for body in raw_texts(schema) or ():
            value = until(body, self._splitter.parts(fmt.value_end))
            ways.append(row(*self._key(key, fmt.key_end_text), value))
        if not only_text(schema):
            value = row(json_of(schema, root), self._said(fmt.value_end))
            ways.append(row(*self._key(key, fmt.key_end_json), value))
        return either(*ways)

    def _key(self, key: str | None, end: str) -> list[Node]:
        if key is not None:
            return [self._said(f"{self._fmt.key_begin}{key}{end}")]
        return [self._said(self._fmt.key_begin), word(_ANY_KEY), self._said(end)]


def _closed(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Of an object; arguments that it does not name are no arguments, unless it says so."""
    if schema is None:
        return {"type": "object"}
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object"} | closed | dict(schema)
