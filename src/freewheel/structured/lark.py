# SPDX-License-Identifier: Apache-2.0
"""A tree of a grammar in Lark, llguidance's dialect; and texts of schemas as expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from freewheel.structured.expressions import plain_classes
from freewheel.structured.tree import ANY_TEXT, Node, Part, Tree

SPACES = r"[\x20\x0A\x0D\x09]{0,40}"
"""Between the parts of JSON."""
_NOTHING = '""'

_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = (
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
TEXT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "email": "[A-Za-z0-9_+-]+([.][A-Za-z0-9_+-]+)*"
    "@[A-Za-z0-9]+([.-][A-Za-z0-9]+)*[.][A-Za-z]{2,24}",
    "uri": r"[a-z][a-z0-9+.-]*:\/\/[A-Za-z0-9._~:\/?#@!$&'()*+,;=-]+",
}
"""Regular expressions of texts in formats that schemas name; some are narrower than the format."""


class Lark:
    """Writes a tree, line by line."""

    def __init__(self, tree: Tree) -> None:
        self._lines: list[str] = []
        for name, node in tree.rules.items():
            self._lines.append(f"{name}: {self._expression(node) or _NOTHING}")
        start = f"start: {self._expression(tree.start) or _NOTHING}"
        self.text = "\n".join([start, *self._lines, ""])

    def _expression(self, node: Node) -> str:
        kind, *inside = node
        if kind in ("row", "any", "maybe", "many"):
            parts = [self._expression(one) for one in inside]
            if kind == "row":
                return " ".join(filter(None, parts))
            if kind == "any":
                return f"({' | '.join(one or _NOTHING for one in parts)})"
            return f"({parts[0]}){'?' if kind == 'maybe' else '*'}"
        if kind == "said":
            return _joined(inside)
        return inside[0] if kind == "rule" else self._text(kind, inside)

    def _text(self, kind: str, inside: Node) -> str:
        if kind == "json":
            whole = {"x-guidance": {"whitespace_pattern": SPACES}} | inside[0]
            return self._named("json", f": %json {json.dumps(whole, ensure_ascii=False)}")
        if kind == "word":
            return self._named("WORD", f": /{inside[0]}/")
        if kind == "free":
            outside = f" & ~/{ANY_TEXT}{escaped(inside[0])}{ANY_TEXT}/" if inside[0] else ""
            return self._named("FREE", f": /{ANY_TEXT}/{outside}")
        assert kind == "until", kind
        return self._until(*inside)

    def _until(self, body: str, *parts: Part) -> str:
        """Free text ends where the parts first begin: at their first control token, if there is
        one, before which any text may stand."""
        lead = parts[0] if isinstance(parts[0], str) else ""
        lazy = "" if any(isinstance(part, int) for part in parts) else "[lazy]"
        name = self._named("text", f"{lazy}: /{body}{escaped(lead)}/")
        return " ".join(filter(None, (name, _joined(parts[1:] if lead else parts))))

    def _named(self, kind: str, rule: str) -> str:
        name = f"{kind}_{len(self._lines)}" if kind.islower() else f"{kind}{len(self._lines)}"
        self._lines.append(f"{name}{rule}")
        return name


def _joined(parts: Sequence[Part]) -> str:
    """An expression for parts one behind the other."""
    return " ".join(_quoted(one) if isinstance(one, str) else f"<[{one}]>" for one in parts)


def raw_texts(schema: Any) -> list[str] | None:
    """Regular expressions of strings of `schema`, as they are; None: it has no strings.

    `tool_schemas.check_text` refuses schemas that say more of strings than that.
    """
    if not isinstance(schema, dict):
        return [ANY_TEXT] if schema is True else None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return [escaped(one) for one in values if isinstance(one, str)] or None
    kind = schema.get("type")
    if kind is None:
        branches = [raw_texts(one) for one in schema.get("anyOf", schema.get("oneOf", ()))]
        found = [text for one in branches for text in one or ()]
        return (found or None) if branches else [ANY_TEXT]
    if kind != "string" and not (isinstance(kind, list) and "string" in kind):
        return None
    return [_string(schema)]


def _string(schema: Mapping[str, Any]) -> str:
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        pattern = plain_classes(pattern)
        head = "" if pattern.startswith("^") else ANY_TEXT
        tail = "" if pattern.endswith("$") and not pattern.endswith("\\$") else ANY_TEXT
        inside = pattern.removeprefix("^")
        inside = inside if tail else inside[:-1]
        return f"{head}({inside.replace('/', chr(92) + '/')}){tail}"
    if schema.get("format") in TEXT_FORMATS:
        return TEXT_FORMATS[schema["format"]]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return ANY_TEXT if not least and most == "" else f"(?s:.{{{least},{most}}})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """`text` in a regular expression between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&~/-])", r"\\\1", text).replace("\n", r"\n")
