# SPDX-License-Identifier: Apache-2.0
"""Parts of a schema as regular expressions of their own: what the library has no words for.

Bounds of integers, excluded values, arrays without repetitions, arrays that must contain something,
arrays whose places differ.
Each becomes a constant that occurs nowhere else; in the expression of the whole schema it is
replaced by its own expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from freewheel.spec.references import steps_of
from freewheel.structured.decimals import bounds_of, numbers
from freewheel.structured.expressions import plain_classes
from freewheel.structured.lark import TEXT_FORMATS
from freewheel.structured.merging import merged
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
MAX_PLACES = 64
"""Items of an array of bounded length that must contain something."""
SPACE = "[ ]?"
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
MAX_DIGITS = 64
"""Of a bound of integers."""
MAX_LETTERS = 256
"""Of a text that is excluded."""
_DEFINITIONS = ("$defs", "definitions")
_LETTER = r'[^"\\\x00-\x1F\x7F-\x9F]'
"""A character that stands in a JSON string as it is."""
_KEY = rf'"({_LETTER}|\\["\\/bfnrt])*"'
_ANY_DIGITS = "[0-9]"


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
            for regex in integers(_after(below, low), _before(above, high))
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
        texts = [_literal(value) for value in values]
        least, most = rest.get("minItems", 0), len(texts) if most is None else most
        if least > len(texts) or _arrangements(len(texts), most) > MAX_ARRANGEMENTS:
            raise Unclear
        return self._part(_bracketed(_orders(texts, least, most)))

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
        return self._part(_bracketed(found))

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
        return self._part(_bracketed(_with_one(any_item, self._sub(wanted), least, most)))

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


def integers(low: int | None, high: int | None) -> list[str]:
    """Expressions of the integers from `low` to `high`, as JSON spells them; None: no bound."""
    if low is not None and high is not None and low > high:
        return []
    found: list[str] = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        found += [f"-{one}" for one in _counts(least, None if low is None else -low)]
    if high is None or high >= 0:
        found += _counts(max(0, low or 0), high)
    return found


def _counts(low: int, high: int | None) -> list[str]:
    """Of whole numbers from `low` >= 0 on, without leading zeros."""
    if high is None:
        digits = len(str(low))
        return [*_counts(low, 10**digits - 1), f"[1-9][0-9]{{{digits},}}"]
    found: list[str] = []
    while low <= high:
        stop = min(high, 10 ** len(str(low)) - 1)  # numbers of as many digits
        found += _alike(f"{low}", f"{stop}")
        low = stop + 1
    return found


def _alike(low: str, high: str) -> list[str]:
    """Of numbers from `low` to `high`, all of as many digits."""
    if low == high:
        return [low]
    if len(low) == 1:
        return [f"[{low}-{high}]"]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _alike(low[1:], high[1:])]
    rest = len(low) - 1
    found: list[str] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        found += [low[0] + one for one in _alike(low[1:], "9" * rest)]
        first += 1
    tail: list[str] = []
    if high[1:] != "9" * rest:
        tail = [high[0] + one for one in _alike("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        found.append(f"[{first}-{last}]{_ANY_DIGITS}{{{rest}}}")
    return found + tail


def _after(value: int | None, low: int | None) -> int | None:
    return low if value is None else value + 1 if low is None else max(low, value + 1)


def _before(value: int | None, high: int | None) -> int | None:
    return high if value is None else value - 1 if high is None else min(high, value - 1)


def other_texts(words: list[str], least: int, most: int | None) -> str | None:
    """Of texts that are none of `words`, without what JSON escapes; None: there are none."""
    own = [word for word in words if re.fullmatch(f"(?:{_LETTER})*", word)]
    return _others(frozenset(own), least, most)


def _others(words: frozenset[str], least: int, most: int | None) -> str | None:
    if most is not None and most < 0:
        return None
    if not words:
        return f"{_LETTER}{{{max(0, least)},{'' if most is None else most}}}"
    firsts = sorted({word[0] for word in words if word})
    below = None if most is None else most - 1
    parts: list[str] = []
    if least <= 0 and "" not in words:
        parts.append("")
    if most is None or most > 0:
        letters = "".join(map(_in_class, firsts))
        first = f'[^{letters}"\\\\\\x00-\\x1F\\x7F-\\x9F]'
        parts.append(f"{first}{_LETTER}{{{max(0, least - 1)},{'' if below is None else below}}}")
        for letter in firsts:
            ends = frozenset(word[1:] for word in words if word[:1] == letter)
            behind = _others(ends, least - 1, below)
            if behind is not None:
                parts.append(_in_text(letter) + behind)
    return f"({'|'.join(parts)})" if parts else None


def _in_class(letter: str) -> str:
    return f"\\{letter}" if letter in r"\^-[]&~" else letter


def _in_text(letter: str) -> str:
    return f"\\{letter}" if letter in r"\.+*?()|[]{}^$#&-~" else letter


def _literal(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return "".join(map(_in_text, text))


def _bracketed(inside: str) -> str:
    return rf"\[{SPACE}{inside}{SPACE}\]"


def _arrangements(count: int, most: int) -> int:
    total = product = 1
    for place in range(min(count, most)):
        product *= count - place
        total += product
    return total


def _orders(texts: list[str], least: int, most: int) -> str:
    """Items of `texts` in any order, none twice, `least` to `most` of them."""

    def behind(left: list[str], least: int, most: int, comma: str) -> str:
        if not left or most <= 0:
            return ""
        parts = []
        for text in left:
            rest = [one for one in left if one is not text]
            parts.append(f"{comma}{text}" + behind(rest, least - 1, most - 1, f",{SPACE}"))
        return f"({'|'.join(parts)}){'' if least > 0 else '?'}"

    return behind(texts, least, most, "")


def _with_one(item: str, wanted: str, least: int, most: int | None) -> str:
    """`least` to `most` items, of which one is `wanted`."""
    before, after = f"({item},{SPACE})", f"(,{SPACE}{item})"
    if most is None:
        found = [f"{before}{{{k}}}{wanted}{after}{{{least - 1 - k},}}" for k in range(least - 1)]
        return "|".join([*found, f"{before}{{{max(0, least - 1)},}}{wanted}{after}*"]).join("()")
    if not 0 < most <= MAX_PLACES:
        raise Unclear
    found = [
        f"{before}{{{k}}}{wanted}{after}{{{max(0, least - 1 - k)},{most - 1 - k}}}"
        for k in range(most)
    ]
    return "|".join(found).join("()")
