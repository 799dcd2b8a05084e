# SPDX-License-Identifier: Apache-2.0
"""JSON-schema keywords drawn together: whatever becomes a table says only what validates."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest

pytest.importorskip("outlines_core")

from freewheel.structured.schema import Refusal
from tests.program.test_schema_keywords import table, walks

Schema = dict[str, Any]
NAMES = "pqrs"
SIMPLE = [None, True, False, "", "a", "b", "cc", 0, 1, 2.5, 5, -3]
BESIDE = "not if anyOf allOf oneOf dependentRequired propertyNames minProperties".split()


def simple(rng: random.Random) -> Schema:
    low = rng.randint(-9, 3)
    return rng.choice(
        [
            {"enum": rng.sample(["a", "b", 1, True, None, 2.5, "cc"], rng.randint(1, 4))},
            {"type": "boolean"},
            {"type": "string", "maxLength": rng.randint(0, 3)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 40)},
            {"type": ["string", "null"]},
            {"type": "integer"},
        ]
    )


def thing(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 3))
    found: Schema = {"type": "object", "properties": {n: drawn(rng, depth - 1) for n in names}}
    found["required"] = [name for name in names if rng.random() < 0.5]
    return found | ({"additionalProperties": False} if rng.random() < 0.5 else {})


def condition(rng: random.Random) -> Any:
    part = {"properties": {rng.choice(NAMES): simple(rng)}}
    return rng.choice(
        [
            {"required": rng.sample(NAMES, rng.randint(1, 2))},
            part,
            part | {"required": [rng.choice(NAMES)]},
            {"enum": ["a", 1, None]},
            {"type": rng.choice(["string", "null", "integer", "object"])},
            {"minimum": 3},
            {"maxLength": 1},
            rng.random() < 0.5,
        ]
    )


def drawn(rng: random.Random, depth: int) -> Schema:
    kind = rng.random() if depth > 0 else 1.0
    if kind < 0.6:
        found = thing(rng, depth)
    elif kind < 0.75:
        found = {rng.choice(["anyOf", "oneOf", "allOf"]): [drawn(rng, depth - 1) for _ in "12"]}
    elif kind < 0.8:
        items = {"type": "array", "items": simple(rng), "maxItems": 2}
        found = items | {rng.choice(["uniqueItems", "contains"]): True}
    else:
        found = simple(rng)
    for keyword in rng.sample(BESIDE, rng.choice([0, 0, 1, 2])):
        found.update(beside(rng, keyword))
    return found


def beside(rng: random.Random, keyword: str) -> Schema:
    if keyword == "if":
        return {"if": condition(rng), "then": condition(rng), "else": condition(rng)}
    if keyword == "dependentRequired":
        return {keyword: {rng.choice(NAMES): [rng.choice(NAMES)]}}
    if keyword == "propertyNames":
        return {keyword: {"enum": ["p", "q", "r"]}}
    if keyword == "minProperties":
        return {keyword: 1}
    return {keyword: condition(rng) if keyword == "not" else [condition(rng) for _ in "12"]}


@pytest.mark.parametrize("part", range(4))
def test_whatever_becomes_a_table_says_only_what_validates(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(150 * part, 150 * (part + 1)):
        schema = drawn(random.Random(seed), 2)
        validator = jsonschema.Draft202012Validator(schema)
        try:
            automaton = table(schema)
        except Refusal as refusal:
            empty = "no value" in str(refusal)
            seen["empty" if empty else "refused"] += 1
            assert not empty or not any(map(validator.is_valid, SIMPLE)), schema
            continue
        seen["table"] += 1
        for text in walks(automaton, 40, seed):
            assert validator.is_valid(json.loads(text)), (schema, text)
    assert seen["table"] >= 15 and seen["empty"] and seen["refused"]
