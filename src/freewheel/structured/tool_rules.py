# SPDX-License-Identifier: Apache-2.0
"""The rules of a grammar of tool calls, line by line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from freewheel.errors import RequestError
from freewheel.structured.lark import ANY_TEXT, Lark, escaped, json_value, only_text, raw_texts
from freewheel.structured.tool_schemas import check_text, in_few_words, kept

if TYPE_CHECKING:
    from freewheel.structured.tools import Tool, ToolFormat

_KEY = re.compile(r"[^\"<>\\\x00-\x1f]{1,256}")
_ANY_KEY = "[A-Za-z_][A-Za-z0-9_]*"


class ToolRules:
    """`lines` grow with each tool; the callers of its methods put them together."""

    def __init__(self, fmt: ToolFormat, control_tokens: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._fmt = fmt
        self._lark = Lark(control_tokens)
        opening = self._lark.parts(fmt.opening)
        self.mark = next((part for part in opening if isinstance(part, int)), None)
        """The first control token of what opens calls."""

    def add(self, number: int, tool: Tool) -> None:
        """The rules of one tool's call: whole, and without the format's opening."""
        fmt, name = self._fmt, f"call{number}"
        arguments = self._arguments(name, kept(tool.name, tool.parameters))
        self._line(f"{name}_body", arguments, self._lark.text(fmt.call_end))
        head = f"{fmt.call_begin}{tool.name}{fmt.name_end}"
        self._line(name, self._lark.text(head), f"{name}_body")
        rest = f"{fmt.begin}{head}"[len(fmt.opening) :]
        self._line(f"{name}_rest", self._lark.text(rest), f"{name}_body")

    def close(self, count: int) -> None:
        """The rules for any of `count` tools."""
        self._line("call", " | ".join(f"call{n}" for n in range(count)))
        self._line("opened", " | ".join(f"call{n}_rest" for n in range(count)))

    def at_once(self, parallel: bool) -> str:
        """Calls and nothing else."""
        return _joined(self._lark.text(self._fmt.begin), self._calls("call", parallel))

    def behind_mark(self, parallel: bool) -> str:
        """What follows the mark."""
        parts = self._lark.parts(self._fmt.opening)
        assert self.mark is not None
        rest = parts[parts.index(self.mark) + 1 :]
        return _joined(self._lark.joined(rest), self._calls("opened", parallel))

    def behind_text(self, parallel: bool) -> str:
        """Text, and perhaps calls behind it. Without a control token, no text holds the opening."""
        opening = self._fmt.opening
        text, rule = self._lark.until("before", opening)
        self.lines.append(rule)
        outside = f" & ~/{ANY_TEXT}{escaped(opening)}{ANY_TEXT}/" if self.mark is None else ""
        self.lines.append(f"FREE: /{ANY_TEXT}/{outside}")
        return f"FREE | {_joined(text, self._calls('opened', parallel))}"

    def _calls(self, first: str, parallel: bool) -> str:
        between = self._lark.text(self._fmt.between)
        more = f"({_joined(between, 'call')})*" if parallel else ""
        return _joined(first, more, self._lark.text(self._fmt.end))

    def _arguments(self, name: str, schema: Mapping[str, Any] | None) -> str:
        if not self._fmt.key_begin:
            self._line(f"{name}_json", json_value(_closed(schema), {}))
            return f"{name}_json"
        if schema is None:
            self.lines.append(f"{name.upper()}_KEY: /{_ANY_KEY}/")
            return f"({self._argument(name, None, True, {})})*"
        return self._listed(name, schema)

    def _listed(self, name: str, schema: Mapping[str, Any]) -> str:
        """One argument behind another, in the order of the schema."""
        whole = in_few_words(schema)
        properties: Mapping[str, Any] = whole.get("properties", {})
        required = whole.get("required", ())
        for key in (*properties, *required):
            if not _KEY.fullmatch(key):
                raise RequestError("tools", f"has an argument {key!r}, which cannot be written")
            if key not in properties:
                raise RequestError("tools", f"requires {key!r}, which is not among its properties")
        return _joined(
            *(
                f"({self._argument(f'{name}_{index}', key, one, schema)})"
                + ("" if key in required else "?")
                for index, (key, one) in enumerate(properties.items())
            )
        )

    def _argument(self, name: str, key: str | None, schema: Any, root: Mapping[str, Any]) -> str:
        """Its key (None: any), and a string as it is or another value as JSON."""
        fmt, ways = self._fmt, list[str]()
        check_text(schema, f"#/properties/{key}")
        for index, body in enumerate(raw_texts(schema) or ()):
            value, rule = self._lark.until(f"{name}_text{index}", fmt.value_end, body)
            self.lines.append(rule)
            ways.append(_joined(self._key(name, key, fmt.key_end_text), value))
        if not only_text(schema):
            self._line(f"{name}_value", json_value(schema, root))
            head = self._key(name, key, fmt.key_end_json)
            ways.append(_joined(head, f"{name}_value", self._lark.text(fmt.value_end)))
        return " | ".join(ways)

    def _key(self, name: str, key: str | None, end: str) -> str:
        if key is not None:
            return self._lark.text(f"{self._fmt.key_begin}{key}{end}")
        begin = self._lark.text(self._fmt.key_begin)
        return _joined(begin, f"{name.upper()}_KEY", self._lark.text(end))

    def _line(self, name: str, *parts: str) -> None:
        self.lines.append(f"{name}: {_joined(*parts) or chr(34) * 2}")


def _closed(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Of an object; arguments that it does not name are no arguments, unless it says so."""
    if schema is None:
        return {"type": "object"}
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object"} | closed | dict(schema)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
