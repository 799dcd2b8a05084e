# SPDX-License-Identifier: Apache-2.0
"""JSON schemas drawn at random: nested objects, enums, patterns, numbers, arrays, $ref, anyOf.

Half of them have a keyword besides that is spelt out: not, uniqueItems, contains, if, oneOf, allOf,
bounds of integers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

NAMES = "name age city tags id kind size note items left right ok colour price unit".split()


def schemas(count: int, seed: int) -> Iterator[Schema]:
    """`count` schemas of objects; each kind of part comes in turn."""
    for index in range(count):
        rng = random.Random(seed * 100_003 + index)
        schema = _object(rng, 2)
        name, part = f"k{index % 10}", PARTS[index % len(PARTS)](rng)
        schema["properties"][name] = part
        schema["required"].append(name)
        if index % 2:
            schema["properties"]["more"] = MORE[index // 2 % len(MORE)](rng)
            schema["required"].append("more")
        if index % 4 == 0:
            schema["$defs"] = {"part": _object(rng, 1)}
            schema["properties"]["ref"] = {"$ref": "#/$defs/part"}
            schema["required"].append("ref")
        yield schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 3))
    properties = {name: _part(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _part(rng: random.Random, depth: int) -> Schema:
    if depth and rng.random() < 0.3:
        return _object(rng, depth - 1)
    return rng.choice(PARTS)(rng)


def _enum(rng: random.Random) -> Schema:
    return {
        "enum": rng.sample(["red", "green", 'a"b', "é", 1, -2.5, True, None], rng.randint(1, 4))
    }


def _pattern(rng: random.Random) -> Schema:
    patterns = [
        "^[a-z]{2,5}$",
        "^(ab|cd){1,3}[0-9]$",
        "^[A-Z][a-z]{0,6} [0-9]{4}$",
        "^#[0-9a-f]{6}$",
    ]
    return {"type": "string", "pattern": rng.choice(patterns)}


def _number(rng: random.Random) -> Schema:
    return {"type": rng.choice(["integer", "number"])}


def _string(rng: random.Random) -> Schema:
    return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)}


def _array(rng: random.Random) -> Schema:
    least = rng.randint(0, 2)
    items = rng.choice([_enum, _number, _pattern])(rng)
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _any_of(rng: random.Random) -> Schema:
    return {"anyOf": [{"type": "null"}, _enum(rng), _string(rng)]}


def _simple(rng: random.Random) -> Schema:
    kinds = [
        {"type": "boolean"},
        {"const": "fixed"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "format": "date"},
        {"type": ["boolean", "null"]},
        {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": 3}]},
    ]
    return rng.choice(kinds)


def _excluding(rng: random.Random) -> Schema:
    words = rng.sample(["", "no", "none", "nobody", "a.b"], rng.randint(1, 3))
    return _string(rng) | {"not": {"enum": words}}


def _bounded(rng: random.Random) -> Schema:
    low = rng.randint(-200, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _without_repetition(rng: random.Random) -> Schema:
    values = rng.sample(["red", "green", "blue", 1, True, None], rng.randint(2, 4))
    return {"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": 1}


def _containing(rng: random.Random) -> Schema:
    items = {"enum": ["a", "b", "c", 4]}
    wanted = {"const": rng.choice(items["enum"])}
    return {"type": "array", "items": items, "contains": wanted, "maxItems": rng.randint(1, 4)}


def _conditional(rng: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"kind": {"enum": ["s", "l", None]}, "size": _bounded(rng), "by": _enum(rng)},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": rng.choice(["s", None])}}},
        "then": {"required": ["size"]},
        "else": {"required": ["by"]} if rng.random() < 0.5 else {"properties": {"by": False}},
    }


def _one_of(rng: random.Random) -> Schema:
    first, second = (
        {"type": "object", "properties": {"of": {"const": n}, "is": part(rng)}, "required": ["of"]}
        for n, part in enumerate((_enum, _bounded))
    )
    return {"oneOf": [first, second, {"type": "null"}]}


def _joined(rng: random.Random) -> Schema:
    return {"allOf": [_bounded(rng), {"not": {"const": rng.randint(-3, 3)}}, {"minimum": -150}]}


PARTS = (_enum, _pattern, _number, _string, _array, _any_of, _simple)
MORE = (_excluding, _bounded, _without_repetition, _containing, _conditional, _one_of, _joined)
"""Of keywords that are spelt out before a table is made."""
