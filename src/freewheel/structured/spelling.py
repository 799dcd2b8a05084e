# SPDX-License-Identifier: Apache-2.0
"""Parts of a schema that become regular expressions (`parts`): what the library has no words for.

Bounds of integers, excluded values, arrays without repetitions, arrays that must contain something,
arrays whose places differ.
Each becomes a constant that occurs nowhere else; in the expression of the whole schema it is
replaced by its own expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from freewheel.spec.references import steps_of
from freewheel.structured.decimals import bounds_of, numbers
from freewheel.structured.expressions import plain_classes
from freewheel.structured.lark import TEXT_FORMATS
from freewheel.structured.merging import merged
from freewheel.structured.parts import (
    LETTER,
    SPACE,
    after,
    arrangements,
    before,
    bracketed,
    integers,
    literal,
    orders,
    other_texts,
    with_one,
)
from freewheel.structured.simplify import excludes, simplified
from freewheel.structured.values import (
    AWRY,
    NOTES,
    Nothing,
    Schema,
    Unclear,
    bounds,
    identity,
    values_of,
)

MAX_ARRANGEMENTS = 2000
"""Beginnings of arrays without repetitions, all counted."""
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
MAX_DIGITS = 64
"""Of a bound of integers."""
MAX_LETTERS = 256
"""Of a text that is excluded."""
_DEFINITIONS = ("$defs", "definitions")
_KEY = rf'"({LETTER}|\\["\\/bfnrt])*"'


class Speller:
    """`build`: the expression of a schema, the library's. Raises what that raises."""

    def __init__(self, source: str, root: Schema, build: Callable[[Schema], str]) -> None:
        self._build = build
        self._parts: dict[str, str] = {}
        self._stem = "part"
        while self._stem in source:
            self._stem += "x"
        self._defs = {key: root[key] for key in _DEFINITIONS if isinstance(root.get(key), dict)}
        self._open: list[Any] = []  # definitions that are being read

    def expression(self, schema: Schema) -> str:
        """The whole schema's."""
        return self._filled(self._build(self._read(schema)))

    def _filled(self, regex: str) -> str:
        marks = re.compile(rf'"{self._stem}[0-9]+y"')
        while marks.search(regex):
            regex = marks.sub(lambda found: self._parts[found.group()[1:-1]], regex)
        return regex

    def _part(self, regex: str) -> Schema:
        mark = f"{self._stem}{len(self._parts)}y"
        self._parts[mark] = f"({regex})"
        return {"const": mark}

    def _read(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        try:
            found = self._spelt(schema)
        except (*AWRY, Nothing):
            found = None
        return self._inside(schema) if found is None else found

    def _inside(self, schema: Schema) -> Schema:
        found = dict(schema)
        if isinstance(found.get("properties"), dict):
            found["properties"] = {key: self._read(one) for key, one in found["properties"].items()}
        for name in _DEFINITIONS:
            if isinstance(found.get(name), dict):
                found[name] = {key: self._definition(one) for key, one in found[name].items()}
        for name in ("anyOf", "prefixItems"):
            if isinstance(found.get(name), list):
                found[name] = [self._read(one) for one in found[name]]
        if isinstance(found.get("items"), dict):
            found["items"] = self._read(found["items"])
        return found

    def _definition(self, schema: Any) -> Any:
        self._open.append(schema)
        try:
            return self._read(schema)
        finally:
            self._open.pop()

    def _spelt(self, schema: Schema) -> Schema | None:
        """None: there is nothing to spell. Raises Unclear for what cannot be."""
        rest = {key: value for key, value in schema.items() if key not in NOTES}
        kind, words = rest.get("type"), rest.keys() - {"type"}
        if kind == "integer" and words:
            return self._integer(rest)
        if kind == "number" and words and words <= _BOUNDS:
            return self._number(rest)
        if kind == "string" and words:
            return self._text(rest)
        if kind == "array" and words:
            return self._array(rest)
        return self._map(rest) if kind == "object" and not rest.get("properties") else None

    def _text(self, rest: Schema) -> Schema | None:
        if "not" in rest:
            return self._string(rest)
        if isinstance(rest.get("pattern"), str):
            return rest | {"pattern": plain_classes(rest["pattern"])}
        known = set(rest) == {"type", "format"} and rest["format"] in TEXT_FORMATS
        return self._part(f'"({TEXT_FORMATS[rest["format"]]})"') if known else None

    def _array(self, rest: Schema) -> Schema | None:
        if rest.get("uniqueItems") is True:
            return self._unique(rest)
        if "prefixItems" in rest:
            return self._places(rest)
        if "contains" in rest:
            return self._containing(rest)
        if "uniqueItems" in rest:
            return self._inside({key: rest[key] for key in rest if key != "uniqueItems"})
        return None

    def _integer(self, rest: Schema) -> Schema:
        if not set(rest) <= _BOUNDS | {"type", "not"} or ("not" in rest and not excludes(rest)):
            raise Unclear
        low, high = bounds(rest)
        if any(len(str(one)) > MAX_DIGITS for one in (low, high) if one is not None):
            raise Unclear
        out = rest["not"]["enum"] if "not" in rest else []
        gone = sorted({int(v) for v in out if identity(v)[0] == "number" and int(v) == v})
        parts = [
            regex
            for below, above in pairwise([None, *gone, None])
            for regex in integers(after(below, low), before(above, high))
        ]
        if not parts:
            raise Unclear
        return self._part("|".join(parts))

    def _number(self, rest: Schema) -> Schema:
        parts = numbers(*bounds_of(rest), integers)
        if not parts:
            raise Unclear
        return self._part("|".join(parts))

    def _map(self, rest: Schema) -> Schema:
        """An object whose keys the schema does not name, all of whose values are of one schema."""
        values = rest.get("additionalProperties", True)
        known = {"type", "properties", "additionalProperties", "required"}
        if not set(rest) <= known or rest.get("required") or values is True or values == {}:
            raise Unclear
        if values is False:
            return self._part(rf"\{{{SPACE}\}}")
        pair = f"{_KEY}{SPACE}:{SPACE}{self._sub(values)}"
        pairs = f"({pair}({SPACE},{SPACE}{pair})*)?"
        return self._part(rf"\{{{SPACE}{pairs}{SPACE}\}}")

    def _string(self, rest: Schema) -> Schema:
        if not set(rest) <= {"type", "not", "minLength", "maxLength"} or not excludes(rest):
            raise Unclear
        words = [word for word in rest["not"]["enum"] if isinstance(word, str)]
        if max(map(len, words), default=0) > MAX_LETTERS:
            raise Unclear
        least, most = rest.get("minLength", 0), rest.get("maxLength")
        if type(least) is not int or type(most) not in (int, type(None)):
            raise Unclear
        regex = other_texts(words, least, most)
        if regex is None:
            raise Unclear
        return self._part(f'"{regex}"')

    def _unique(self, rest: Schema) -> Schema:
        if not set(rest) <= {"type", "items", "minItems", "maxItems", "uniqueItems"}:
            raise Unclear
        most = rest.get("maxItems")
        if most is not None and most <= 1:
            return self._inside({key: rest[key] for key in rest if key != "uniqueItems"})
        values = values_of(rest.get("items"))
        if values is None:
            raise Unclear
        texts = [literal(value) for value in values]
        least, most = rest.get("minItems", 0), len(texts) if most is None else most
        if least > len(texts) or arrangements(len(texts), most) > MAX_ARRANGEMENTS:
            raise Unclear
        return self._part(bracketed(orders(texts, least, most)))

    def _places(self, rest: Schema) -> Schema:
        """An array whose places have schemas of their own. There may be fewer items, but no more:
        what `items` would allow behind them is not written."""
        known = {"type", "prefixItems", "items", "minItems", "maxItems"}
        if not set(rest) <= known or rest.get("items", False) is not False:
            raise Unclear
        items = [self._sub(one) for one in rest["prefixItems"]]
        least, most = rest.get("minItems", 0), min(rest.get("maxItems", len(items)), len(items))
        if least > most:
            raise Unclear
        found = ""
        for place in reversed(range(most)):
            comma = f"{SPACE},{SPACE}" if place else ""
            found = f"({comma}{items[place]}{found}){'' if place < least else '?'}"
        return self._part(bracketed(found))

    def _containing(self, rest: Schema) -> Schema:
        known = {"type", "items", "minItems", "maxItems", "contains", "minContains"}
        if not set(rest) <= known or rest.get("minContains", 1) != 1:
            raise Unclear
        items = rest.get("items")
        if not isinstance(items, dict):
            raise Unclear
        wanted = simplified(self._defs | merged(items, rest["contains"]))
        any_item = self._sub(items)
        least, most = rest.get("minItems", 0), rest.get("maxItems")
        return self._part(bracketed(with_one(any_item, self._sub(wanted), least, most)))

    def _sub(self, whole: Schema) -> str:
        schema = {name: one for name, one in whole.items() if name not in _DEFINITIONS}
        needed = self._needed(schema)
        return f"(?:{self._filled(self._build(self._read(needed | schema)))})"

    def _needed(self, schema: Schema) -> Schema:
        """The definitions that a part refers to. Raises Unclear for one that the part is in."""
        found: Schema = {name: {} for name in self._defs}
        left: list[Any] = [schema]
        while left:
            one = left.pop()
            left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            reference = one.get("$ref") if isinstance(one, dict) else None
            if not isinstance(reference, str):
                continue
            home, name, *_ = [*steps_of(reference), "", ""]
            if home not in self._defs or name not in self._defs[home] or name in found[home]:
                continue
            found[home][name] = target = self._defs[home][name]
            if any(target is each for each in self._open):
                raise Unclear
            left.append(target)
        return found
