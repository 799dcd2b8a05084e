# SPDX-License-Identifier: Apache-2.0
"""Pieces of Lark, in llguidance's dialect, of which grammars of tool calls are put together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

ANY_TEXT = "(?s:.*)"
SPACES = r"[\x20\x0A\x0D\x09]{0,40}"
"""Between the parts of JSON."""

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
    """Texts in which control tokens, given with their ids, stand for themselves."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._tokens = control_tokens
        longest = sorted(control_tokens, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    def parts(self, text: str) -> list[str | int]:
        """`text` cut at control tokens."""
        found: list[str | int] = []
        place = 0
        for match in self._split.finditer(text):
            found += [text[place : match.start()]] if match.start() > place else []
            found.append(self._tokens[match.group()])
            place = match.end()
        return [*found, text[place:]] if place < len(text) else found

    def text(self, text: str) -> str:
        """An expression for exactly `text`."""
        return self.joined(self.parts(text))

    def joined(self, parts: list[str | int]) -> str:
        """An expression for parts one behind the other."""
        return " ".join(_quoted(one) if isinstance(one, str) else f"<[{one}]>" for one in parts)

    def until(self, name: str, text: str, body: str = ANY_TEXT) -> tuple[str, str]:
        """(expression, rule) for what `body`, a regular expression, matches, and then `text`.

        Free text ends where `text` first begins: at its first control token, if it has one, before
        which any text may stand.
        """
        parts = self.parts(text)
        mark = next((n for n, part in enumerate(parts) if isinstance(part, int)), None)
        lead = parts[0] if isinstance(parts[0], str) else ""
        rest = parts[1:] if lead else parts
        kind = "[lazy]" if mark is None else ""
        rule = f"{name}{kind}: /{body}{escaped(lead)}/"
        return " ".join(filter(None, (name, self.joined(rest)))), rule


def json_value(schema: Any, root: Mapping[str, Any]) -> str:
    """An expression for JSON of `schema`, in which references are looked for in `root`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    whole = {key: root[key] for key in ("$defs", "definitions") if key in root} | dict(schema)
    options = {"whitespace_pattern": SPACES}
    return f"%json {json.dumps({'x-guidance': options} | whole, ensure_ascii=False)}"


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


def only_text(schema: Any) -> bool:
    """No value of `schema` is other than a string."""
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return all(isinstance(one, str) for one in values)
    return schema.get("type") in ("string", ["string"])


def _string(schema: Mapping[str, Any]) -> str:
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
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
