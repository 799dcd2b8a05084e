# SPDX-License-Identifier: Apache-2.0
"""JSON-schema keywords that are spelt out: every text of a table validates, and none is missing."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("outlines_core")

from freewheel.spec import HostGrammar
from freewheel.structured import worker
from freewheel.structured.parts import integers
from freewheel.structured.schema import Refusal, parsed
from freewheel.structured.tables import ByteAutomaton

Schema = dict[str, Any]
TEXT = {"type": "string", "maxLength": 4}
COLOUR = {"enum": ["red", "green", "blue"]}
ADDRESS = {
    "type": "object",
    "properties": {
        "country": {"enum": ["US", "CA"]},
        "code": {"type": "string", "maxLength": 5},
        "state": {"enum": ["NY", "TX"]},
    },
    "required": ["country"],
    "additionalProperties": False,
}


def thing(properties: Schema, *required: str, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": [*required]} | more


SPELT: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "not-const": ({"type": "string", "not": {"const": "ab"}}, ["", "a", "abc", "b"], ["ab"]),
    "not-enum": (
        {"type": "string", "not": {"enum": ["", "no", "nope"]}, "minLength": 1, "maxLength": 5},
        ["n", "nop", "nopes", "yes"],
        ["", "no", "nope", "longer"],
    ),
    "not-text-of-signs": (
        {"type": "string", "not": {"enum": ["a.b", "[x]", "^-]"]}, "maxLength": 3},
        ["axb", "[y]", "^-", "-", "]"],
        ["a.b", "[x]", "^-]"],
    ),
    "not-type": ({"type": ["string", "null"], "not": {"type": "string"}}, [None], ["a"]),
    "not-in-list": (COLOUR | {"not": {"enum": ["red"]}}, ["green", "blue"], ["red"]),
    "not-long": ({"type": "string", "not": {"minLength": 3}}, ["", "ab"], ["abc"]),
    "not-integer": ({"type": "integer", "not": {"enum": [0, 7]}}, [1, -7, 70, 8, 6], [0, 7]),
    "not-together": (
        thing({"a": TEXT, "b": TEXT}, "a", **{"not": {"required": ["a", "b"]}}),
        [{"a": "x"}],
        [{"a": "x", "b": "y"}, {}],
    ),
    "not-of-property": (
        thing(
            {"k": COLOUR, "n": {"type": "null"}},
            "k",
            **{"not": {"properties": {"k": {"const": "red"}}}},
        ),
        [{"k": "blue"}, {"k": "green", "n": None}],
        [{"k": "red"}, {"k": "red", "n": None}],
    ),
    "unique": (
        {"type": "array", "items": COLOUR, "uniqueItems": True, "minItems": 1},
        [["red"], ["blue", "red"], ["green", "blue", "red"]],
        [[], ["red", "red"], ["red", "blue", "red"]],
    ),
    "unique-mixed": (
        {
            "type": "array",
            "items": {"enum": [1, True, "1", None]},
            "uniqueItems": True,
            "maxItems": 2,
        },
        [[], [1, True], ["1", 1], [None]],
        [[1, 1], [True, True], [1, True, None]],
    ),
    "unique-bounded": (
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 3},
            "uniqueItems": True,
        },
        [[], [3, 0], [0, 1, 2, 3]],
        [[0, 0], [4]],
    ),
    "unique-one": (
        {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1},
        [[], ["a"]],
        [["a", "a"], ["a", "b"]],
    ),
    "contains": (
        {"type": "array", "items": COLOUR, "contains": {"const": "red"}, "maxItems": 3},
        [["red"], ["blue", "red"], ["red", "red", "green"]],
        [[], ["blue"], ["red"] * 4],
    ),
    "contains-in-many": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 10}, "minItems": 2},
        [[1, 10], [99, 3], [5, 11, 5]],
        [[10], [1, 2], [9, 9, 9]],
    ),
    "if-then-else": (
        ADDRESS
        | {
            "if": {"properties": {"country": {"const": "US"}}},
            "then": {"required": ["state"]},
            "else": {"required": ["code"]},
        },
        [{"country": "US", "state": "NY"}, {"country": "CA", "code": "K1A"}],
        [{"country": "US"}, {"country": "CA"}, {"country": "CA", "state": "NY"}],
    ),
    "if-property-absent": (
        thing(
            {"a": {"type": "boolean"}, "b": TEXT},
            **{
                "if": {"required": ["a"], "properties": {"a": {"const": True}}},
                "then": {"required": ["b"]},
            },
        ),
        [{}, {"a": False}, {"a": True, "b": "x"}, {"b": "y"}],
        [{"a": True}],
    ),
    "then-narrows": (
        thing(
            {"kind": {"enum": ["s", "l"]}, "size": {"type": "integer"}},
            "kind",
            "size",
            **{
                "if": {"properties": {"kind": {"const": "s"}}},
                "then": {"properties": {"size": {"maximum": 9, "minimum": 0}}},
                "else": {"properties": {"size": {"minimum": 10}}},
            },
        ),
        [{"kind": "s", "size": 9}, {"kind": "l", "size": 10}],
        [{"kind": "s", "size": 10}, {"kind": "l", "size": 9}, {"kind": "s", "size": -1}],
    ),
    "then-without-if": (COLOUR | {"then": False}, ["red"], ["pink"]),
    "property-names": (
        thing(
            {"ab": TEXT, "abc": TEXT, "x1": TEXT},
            "ab",
            propertyNames={"pattern": "^[a-z]+$", "maxLength": 2},
        ),
        [{"ab": "x"}],
        [{"ab": "x", "abc": "y"}, {"ab": "x", "x1": "y"}],
    ),
    "dependent-required": (
        thing({"a": TEXT, "b": TEXT, "c": TEXT}, dependentRequired={"a": ["b"], "b": ["c"]}),
        [{}, {"c": "1"}, {"b": "1", "c": "2"}, {"a": "0", "b": "1", "c": "2"}],
        [{"a": "0"}, {"b": "1"}, {"a": "0", "b": "1"}],
    ),
    "all-of": (
        {
            "allOf": [
                thing({"a": TEXT}, "a"),
                thing({"b": {"type": "integer"}}),
                {"properties": {"b": {"maximum": 3}}},
            ]
        },
        [{"a": "x"}, {"a": "x", "b": 3}, {"a": "", "b": -30}],
        [{"b": 1}, {"a": "x", "b": 4}],
    ),
    "one-of-kinds": (
        {
            "oneOf": [
                thing(
                    {"kind": {"const": "c"}, "r": {"type": "integer", "minimum": 1}}, "kind", "r"
                ),
                thing({"kind": {"const": "s"}, "w": TEXT}, "kind"),
                {"type": "null"},
            ]
        },
        [{"kind": "c", "r": 1}, {"kind": "s"}, {"kind": "s", "w": "x"}, None],
        [{"kind": "c"}, {"kind": "c", "r": 0}, {"r": 1}],
    ),
    "any-of-beside-properties": (
        thing({"a": TEXT, "b": TEXT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": "x"}, {"b": "x"}, {"a": "x", "b": "y"}],
        [{}],
    ),
    "reference-beside": (
        {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5},
        [5, 60],
        [4, -5],
    ),
    "reference-within": (
        {"$defs": {"n": {"type": "integer", "maximum": 9, "minimum": -1}}}
        | {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
        [[], [-1, 9]],
        [[10], [-2]],
    ),
    "listed-and-bounded": (
        {"enum": [1, 5, 9, "x"], "type": "integer", "minimum": 4},
        [5, 9],
        [1, "x"],
    ),
    "between": (
        {"type": "integer", "minimum": -12, "exclusiveMaximum": 345},
        [-12, 0, 7, 344],
        [-13, 345, 3450],
    ),
    "above": ({"type": "integer", "exclusiveMinimum": 2.5}, [3, 99, 1000], [2, -3, 0]),
    "below": ({"type": "integer", "maximum": -5}, [-5, -10, -99], [-4, 0, 5]),
    "unevaluated": (thing({"a": TEXT}, unevaluatedProperties=False), [{}, {"a": "x"}], [{"b": 1}]),
    "counted": (
        thing({"a": TEXT, "b": TEXT}, "a", minProperties=1, maxProperties=2),
        [{"a": "x"}],
        [{}],
    ),
}


def table(schema: Schema) -> ByteAutomaton:
    return worker.automaton_of(worker.regex_of("json_schema", json.dumps(schema)))


def takes(automaton: ByteAutomaton, text: str) -> bool:
    state = automaton.start
    for byte in text.encode():
        state = int(automaton.following[state, byte])
        if not state:
            return False
    return bool(automaton.ends[state])


def walks(automaton: ByteAutomaton, count: int, seed: int) -> list[str]:
    """Texts drawn at random, those that come to an end."""
    rng = random.Random(seed)
    found: list[str] = []
    for _ in range(count):
        state, text = automaton.start, bytearray()
        for _ in range(200):
            ways = np.flatnonzero(automaton.following[state])
            if automaton.ends[state] and (not len(ways) or rng.random() < 0.3):
                found.append(text.decode("utf-8", "replace"))
                break
            if not len(ways):
                break
            plain = [byte for byte in ways if 32 < byte < 127]
            byte = int(rng.choice(plain or list(ways)))
            text.append(byte)
            state = int(automaton.following[state, byte])
    return found


@pytest.mark.parametrize("name", SPELT)
def test_a_table_allows_what_the_schema_allows_and_nothing_else(name: str) -> None:
    schema, good, bad = SPELT[name]
    validator = jsonschema.Draft202012Validator(schema)
    assert all(map(validator.is_valid, good)) and not any(map(validator.is_valid, bad))
    automaton = table(schema)
    for value in good:
        assert takes(automaton, json.dumps(value, separators=(",", ":"))), value
        assert takes(automaton, json.dumps(value)), value
    for value in bad:
        assert not takes(automaton, json.dumps(value)), value
    texts = walks(automaton, 300, seed=len(name))
    assert len(texts) >= 20
    for text in texts:
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", SPELT)
def test_a_simpler_schema_allows_nothing_more(name: str) -> None:
    """It is what the host follows where there is no table."""
    schema, good, _ = SPELT[name]
    simple = jsonschema.Draft202012Validator(parsed(json.dumps(schema)))
    assert all(map(simple.is_valid, good))
    for text in walks(table(schema), 50, seed=1):
        assert simple.is_valid(json.loads(text))


def test_integers_between_bounds_are_all_spelt() -> None:
    ends = [
        None,
        -1000,
        -101,
        -100,
        -99,
        -10,
        -9,
        -1,
        0,
        1,
        9,
        10,
        11,
        99,
        100,
        109,
        110,
        999,
        1000,
    ]
    for low, high in itertools.product(ends, ends):
        regexes = integers(low, high)
        if low is not None and high is not None and low > high:
            assert not regexes
            continue
        automaton = worker.automaton_of("|".join(f"({one})" for one in regexes))
        least, most = -1111 if low is None else low, 1111 if high is None else high
        for value in {
            *range(-15, 16),
            *range(95, 112),
            *(n + d for n in ends if n for d in (-1, 1)),
        }:
            assert takes(automaton, f"{value}") == (least <= value <= most), (low, high, value)
        assert not takes(automaton, "007") and not takes(automaton, "1.5")


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "items": TEXT, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "items": {"enum": [*range(40)]}, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": {"const": 1}}, "'contains'"),
        ({"type": "array", "items": TEXT, "contains": TEXT, "maxContains": 2}, "'contains'"),
        ({"not": {"type": "integer"}}, "'not'.*type"),
        (
            thing({"a": TEXT}, **{"if": {"properties": {"a": {"pattern": "x"}}}, "then": False}),
            "'if'",
        ),
        (thing({"a": TEXT}, "a", **{"not": {"required": ["a"]}}), "no value"),
        ({"type": "string", "enum": ["a"], "minLength": 2}, "no value"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value"),
        (thing({"a": TEXT}, dependentRequired=[]), "'dependentRequired'"),
        (thing({"a": TEXT}, propertyNames=3), "'propertyNames'"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_no_automaton_keeps_is_refused_by_name(schema: Schema, word: str) -> None:
    with pytest.raises(worker.Refusal, match=word):
        worker.form_of("json_schema", json.dumps(schema), [bytes([byte]) for byte in range(256)])


BIT = {"type": "boolean"}
ITEMS = {"type": "array", "items": BIT, "contains": {"const": True}}
PAIR = {
    "type": "array",
    "items": thing({"x": {"$ref": "#/$defs/bit"}, "y": BIT}, "x"),
    "contains": {"required": ["y"]},
}
AWRY: dict[str, str] = {
    "no number in a list": '{"enum": [NaN]}',
    "no number in a constant": '{"type": "object", "properties": {"a": {"const": -Infinity}}}',
    "beyond all numbers in a list": '{"enum": [1e400]}',
    "beyond all numbers as a bound": '{"type": "integer", "minimum": 1e400}',
    "a multiple of nothing": '{"enum": [1, 2], "multipleOf": 0}',
    "a truth as a bound": '{"type": "integer", "minimum": true}',
    "a text as a length": '{"type": "string", "minLength": "x", "not": {"const": "y"}}',
    "a text as a count": '{"type": "array", "items": {"enum": [1]}, "uniqueItems": true, '
    '"minItems": "x"}',
    "a broken length": '{"type": "string", "minLength": 2.5, "not": {"const": "y"}}',
    "half a character": '{"enum": ["\\ud800"], "not": {"const": "x"}}',
    "a long text to exclude": f'{{"type": "string", "not": {{"const": "{"z" * 5000}"}}}}',
    "a text as needed names": '{"type": "object", "properties": {"a": {"type": "null"}}, '
    '"required": "a"}',
    "a text as names": '{"type": "object", "properties": {"a": {"type": "null"}}, '
    '"not": {"required": "a"}}',
    "a bound of many digits": f'{{"type": "integer", "minimum": {"9" * 4000}}}',
    "an array that holds itself": '{"$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}'
    ', "contains": {"$ref": "#/$defs/A"}}}, "$ref": "#/$defs/A"}',
}


@pytest.mark.parametrize("what", AWRY)
def test_a_schema_that_is_none_is_refused_in_words(what: str) -> None:
    """By a refusal, not by an error that ends the process of grammars."""
    with pytest.raises(Refusal):
        worker.regex_of("json_schema", AWRY[what])


def test_a_definition_may_contain_something_and_another_definition() -> None:
    schema = {
        "$defs": {"flags": ITEMS, "pair": PAIR, "bit": BIT},
        **thing({"a": {"$ref": "#/$defs/flags"}, "b": {"$ref": "#/$defs/pair"}}, "a", "b"),
    }
    automaton = worker.automaton_of(worker.regex_of("json_schema", json.dumps(schema)))
    has, lacks = {"x": True, "y": False}, {"x": True}
    for a, b, right in (
        ([False, True], [lacks, has], True),
        ([False], [has], False),
        ([True], [lacks], False),
        ([], [], False),
    ):
        assert takes(automaton, json.dumps({"a": a, "b": b})) == right


MONEY = {"type": ["number", "null"], "minimum": 0.5}
"""No table has it: the host follows."""
FOLLOWED: dict[str, tuple[Schema, str, str]] = {
    "maxProperties": (
        thing({"m": MONEY}, maxProperties=1),
        '{"m":0.75}',
        '{"m":0.75,"x":1}',
    ),
    "propertyNames": (
        thing({"m": MONEY, "ab": BIT}, propertyNames={"maxLength": 1}),
        '{"m":2.5}',
        '{"ab":true}',
    ),
    "dependentRequired": (
        thing({"m": MONEY, "a": BIT}, dependentRequired={"a": ["m"]}),
        '{"m":0.5,"a":true}',
        '{"a":true}',
    ),
    "not": (
        thing({"m": MONEY, "a": BIT}, **{"not": {"required": ["m", "a"]}}),
        '{"m":0.5}',
        '{"m":0.5,"a":true}',
    ),
    "a property that nothing satisfies": (
        thing({"m": MONEY, "a": {"allOf": [BIT, {"type": "null"}]}}),
        '{"m":0.5}',
        '{"m":0.5,"a":true}',
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_the_host_follows_allows_nothing_more_either(name: str) -> None:
    """There, an object has any further properties, unless the schema says that it has none."""
    pytest.importorskip("llguidance")
    schema, good, bad = FOLLOWED[name]
    vocabulary: list[bytes | None] = [bytes([byte]) for byte in range(256)]
    form = worker.form_of("json_schema", json.dumps(schema), vocabulary)
    assert isinstance(form, HostGrammar)
    for text, right in ((good, True), (bad, False)):
        matcher = worker.matcher_of(form.source, worker.tokenizer_of(vocabulary))
        count = matcher.validate_tokens(list(text.encode()))
        if count == len(text):
            matcher.consume_tokens(list(text.encode()))
        assert (count == len(text) and matcher.is_accepting()) == right
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) == right


PLACE_BY_PLACE = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}]}
PLACED = {
    "closed": PLACE_BY_PLACE | {"items": False},
    "whole": PLACE_BY_PLACE | {"items": False, "minItems": 2, "maxItems": 2},
    "one or two": PLACE_BY_PLACE | {"items": False, "minItems": 1},
    "one at most": PLACE_BY_PLACE | {"items": False, "maxItems": 1},
    "none": {"type": "array", "prefixItems": [], "items": False},
}


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("value", [[], [1], [1, True], [True], [1, True, 1], [1, 2]], ids=str)
def test_places_of_an_array_may_stay_empty_on_the_device_too(name: str, value: Any) -> None:
    schema = PLACED[name]
    valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert takes(table(schema), json.dumps(value)) == valid
    assert follows(schema, json.dumps(value)) == valid


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d+$", "019", "\u0663"),
        (r"^\w+$", "aZ_9", "\u00e9"),
        (r"^[\d.-]+$", "1.-", "\u0663"),
        (r"^[^\d\"\\\\\x00-\x1f]$", "\u0663", "5"),
        (r"^\\d$", None, "5"),
    ],
)
def test_classes_of_a_pattern_are_ascii_on_device_and_host(
    pattern: str, good: str | None, bad: str
) -> None:
    """As ECMA-262 has them, which JSON Schema refers to."""
    schema = {"type": "string", "pattern": pattern}
    forms = [follows(schema, json.dumps(bad, ensure_ascii=False))]
    if good is not None:
        assert follows(schema, json.dumps(good, ensure_ascii=False))
        assert takes(table(schema), json.dumps(good, ensure_ascii=False))
        forms.append(takes(table(schema), json.dumps(bad, ensure_ascii=False)))
    assert not any(forms)


def follows(schema: Schema, text: str) -> bool:
    """Whether the host's grammar takes a text, whole."""
    vocabulary: list[bytes | None] = [bytes([n]) for n in range(256)]
    form = worker.followed("json_schema", json.dumps(schema), vocabulary)
    matcher = worker.matcher_of(form.source, worker.tokenizer_of(vocabulary))
    tokens = list(text.encode())
    count = matcher.try_consume_tokens(tokens)
    return count == len(tokens) and matcher.is_accepting()


STRANGE: dict[str, Any] = {
    "foo": 1,
    "minimun": 3,
    "maxlength": 3,
    "requierd": ["a"],
    "additionalproperties": False,
    "Type": "string",
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "x-guidance": {"lenient": True},
    "strict": True,
    "nullable": True,
    "dependencies": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "additionalItems": False,
    "unevaluatedItems": False,
    "discriminator": {"propertyName": "a"},
    "id": {"type": "string"},
}
PLACES: dict[str, Any] = {
    "#": lambda one: one,
    "#/properties/a": lambda one: thing({"a": one}, "a"),
    "#/properties/a/items": lambda one: thing({"a": {"type": "array", "items": one}}),
    "#/prefixItems/1": lambda one: {"type": "array", "prefixItems": [BIT, one]},
    "#/items/0": lambda one: {"type": "array", "items": [one], "additionalItems": False},
    "#/additionalItems": lambda one: {"type": "array", "items": [BIT], "additionalItems": one},
    "#/anyOf/1": lambda one: {"anyOf": [BIT, one]},
    "#/oneOf/0": lambda one: {"oneOf": [one, BIT]},
    "#/allOf/0/anyOf/0": lambda one: {"allOf": [{"anyOf": [one, BIT]}]},
    "#/$defs/n": lambda one: thing({"a": {"$ref": "#/$defs/n"}}) | {"$defs": {"n": one}},
    "#/definitions/n": lambda one: {"definitions": {"n": one}, "type": "null"},
    "#/$defs/n/$defs/m": lambda one: {"$defs": {"n": {"$defs": {"m": one}}}, "type": "null"},
    "#/patternProperties/^a": lambda one: {"type": "object", "patternProperties": {"^a": one}},
    "#/additionalProperties": lambda one: {"type": "object", "additionalProperties": one},
    "#/propertyNames": lambda one: thing({"a": BIT}, propertyNames=one),
    "#/not": lambda one: {"type": "string", "not": one},
    "#/then": lambda one: thing({"a": BIT}, **{"if": {"required": ["a"]}, "then": one}),
    "#/contains": lambda one: {"type": "array", "items": TEXT, "contains": one},
    "#/examples/0": lambda one: {"$ref": "#/examples/0", "examples": [one]},
    "#/ex%61mples/0": lambda one: {"$ref": "#/ex%61mples/0", "examples": [one]},
}


def form(schema: Schema) -> Any:
    return worker.form_of("json_schema", json.dumps(schema), [bytes([n]) for n in range(256)])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keyword", STRANGE)
def test_a_keyword_that_nobody_enforces_is_refused_by_name_wherever_it_stands(
    keyword: str, place: str
) -> None:
    schema = PLACES[place]({"type": "string", "maxLength": 2, keyword: STRANGE[keyword]})
    with pytest.raises(Refusal) as caught:
        form(schema)
    assert f"uses {keyword!r} at {place}, " in str(caught.value)


@pytest.mark.parametrize(
    ("keyword", "meant"), [("minimun", "minimum"), ("maxlength", "maxLength"), ("foo", None)]
)
def test_a_misspelt_keyword_is_refused_with_the_right_one(keyword: str, meant: str | None) -> None:
    with pytest.raises(Refusal) as caught:
        form({"type": "integer", keyword: 1})
    assert str(caught.value).endswith(f"did you mean {meant!r}?" if meant else "be enforced")


NAMES = {"foo": 1, "strict": True, "minimun": {"x-order": [{"requierd": 2}]}}
NOT_KEYWORDS: dict[str, Schema] = {
    "properties": thing({"foo": BIT, "strict": BIT}, "foo"),
    "patternProperties": {"type": "object", "patternProperties": {"foo": BIT}},
    "definitions": {"$defs": {"foo": BIT}, "definitions": {"strict": BIT}, "$ref": "#/$defs/foo"},
    "dependentRequired": thing({"foo": BIT, "strict": BIT}, dependentRequired={"foo": ["strict"]}),
    "enum": {"enum": [NAMES, 1]},
    "const": {"const": NAMES},
    "default": BIT | {"default": NAMES},
    "examples": BIT | {"examples": [NAMES]},
    "notes": BIT
    | {"title": "t", "description": "d", "$comment": "c", "deprecated": True}
    | {"readOnly": True, "writeOnly": False, "$schema": "s", "$id": "i"},
    "vendors' notes": thing({"x-a": BIT | {"x-order": 1, "example": 0}}, **{"x-b": {"foo": 1}}),
    "words that say nothing": thing(
        {"a": {"type": "array", "items": BIT, "uniqueItems": False}}, nullable=False
    ),
    "vendors' notes within a reference to itself": {
        "$defs": {"n": {"anyOf": [BIT, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}},
        "anyOf": [{"$ref": "#/$defs/n", "x-kind": "n"}],
    },
    "an id of draft 4": BIT | {"id": "i"},
    "an anchor": {"$defs": {"n": BIT | {"$anchor": "here"}}, "$ref": "#here"},
    "a discriminator": {
        "oneOf": [thing({"k": {"const": one}}, "k") for one in "ab"],
        "discriminator": {"propertyName": "k", "mapping": {"a": "#/oneOf/0"}},
    },
    "further items": {"type": "array", "items": [BIT], "additionalItems": False},
    "a reference to itself": {
        "$defs": {"n": {"anyOf": [BIT, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}},
        "$ref": "#/$defs/n",
    },
}


@pytest.mark.parametrize("name", NOT_KEYWORDS)
def test_names_values_and_notes_are_no_keywords(name: str) -> None:
    pytest.importorskip("llguidance")
    assert form(NOT_KEYWORDS[name])
