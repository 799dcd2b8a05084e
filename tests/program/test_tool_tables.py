# SPDX-License-Identifier: Apache-2.0
"""Calls of usual tools are held to their schemas on the device, in every way of writing them."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from freewheel import LLM, SamplingParams
from freewheel.chat import GLM_MARKUP, V4_MARKUP, V32_MARKUP, CallBegun, CallDelta
from freewheel.chat import Tool as Offered
from freewheel.errors import RequestError
from freewheel.spec import Grammar, HostGrammar
from freewheel.structured import DSML_V4, DSML_V32, GLM, JSON_CALLS, Tool, ToolFormat, tool_grammar
from freewheel.structured.tables import ByteAutomaton
from tests.program.tool_definitions import DEFINITIONS

worker = pytest.importorskip("freewheel.structured.worker")

FORMATS = {"v32": DSML_V32, "v4": DSML_V4, "glm": GLM, "json": JSON_CALLS}
MARKUPS = {"v32": V32_MARKUP, "v4": V4_MARKUP, "glm": GLM_MARKUP}
NAMES = ("｜DSML｜", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>")
CONTROL = {name: 256 + n for n, name in enumerate(NAMES)}
VOCABULARY: list[bytes | None] = [*(bytes([n]) for n in range(256)), *[None] * 8]
TABLED = 0.8
"""Of all definitions, at least so many run on the device."""


@cache
def form_of(name: str, fmt: ToolFormat, controlled: bool) -> Any:
    tool = Tool(name, DEFINITIONS[name])
    found = tool_grammar([tool], "required", fmt, CONTROL if controlled else {})
    assert found is not None
    return worker.form_of("calls", found.calls, VOCABULARY)


@pytest.mark.parametrize("controlled", [True, False], ids=["control", "text"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_most_tools_run_on_the_device(fmt: str, controlled: bool) -> None:
    forms = {name: form_of(name, FORMATS[fmt], controlled) for name in DEFINITIONS}
    tabled = [name for name, form in forms.items() if isinstance(form, Grammar)]
    print(f"{fmt}: {len(tabled)} of {len(forms)} tools on the device")
    assert len(tabled) >= TABLED * len(forms)


def draw(table: Grammar, rng: random.Random, free: int) -> str:
    """A text that the table allows: `free` tokens at random, then by the shortest way to an end."""
    cells = np.frombuffer(table.table, dtype=np.int16)
    kinds, lines = cells[: len(VOCABULARY)], cells[len(VOCABULARY) :]
    lines = lines.reshape(table.states, table.classes + 1)
    far = np.where(lines[:, -1] > 0, 0, 1 << 20)
    nexts = lines[:, :-1]
    while True:
        best = np.where(nexts >= 0, far[nexts], 1 << 20).min(1) + 1
        if (np.minimum(far, best) == far).all():
            break
        far = np.minimum(far, best)
    said, state = list[bytes](), table.start
    names = {token: name.encode() for name, token in CONTROL.items()}
    plain = [
        token
        for token in range(len(VOCABULARY))
        if token >= 256 or token == 10 or 32 <= token < 127
    ]
    while free > 0 or not lines[state, -1]:
        may = [token for token in plain if nexts[state, kinds[token]] >= 0]
        if not may:
            break
        if free <= 0:
            nearest = min(far[nexts[state, kinds[token]]] for token in may)
            may = [token for token in may if far[nexts[state, kinds[token]]] == nearest]
        token = rng.choice(may)
        free -= 1
        said.append(names.get(token) or bytes([token]))
        state = nexts[state, kinds[token]]
    return b"".join(said).decode()


def arguments_of(fmt: str, name: str, text: str) -> list[Any]:
    """Of every call that the parser reads."""
    parser = MARKUPS[fmt].parser([Offered(name, None, DEFINITIONS[name])])
    calls = list[str]()
    for event in [*parser.push(text), *parser.finish()]:
        if isinstance(event, CallBegun):
            calls.append("")
        elif isinstance(event, CallDelta):
            calls[-1] += event.text
    assert calls and len(calls) == parser.ended
    return [json.loads(one) for one in calls]


@pytest.mark.parametrize("fmt", MARKUPS)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_whatever_a_table_allows_is_a_valid_call(name: str, fmt: str) -> None:
    form = form_of(name, FORMATS[fmt], True)
    if not isinstance(form, Grammar):
        pytest.skip("followed on the host")
    checker = jsonschema.Draft202012Validator(DEFINITIONS[name] or {})
    rng = random.Random(f"{name} {fmt}")
    for free in (0, 0, 40, 80, 160, 320):
        text = draw(form, rng, free)
        for arguments in arguments_of(fmt, name, text):
            assert checker.is_valid(arguments), (text, arguments)


def test_every_choice_of_arguments_is_kept_and_no_other() -> None:
    """Root `anyOf`, `minProperties` and the like, where arguments stand one by one."""
    free = {name: {"type": "boolean"} for name in "abc"}
    schemas: list[dict[str, Any]] = [
        {"properties": free, "anyOf": [{"required": ["a"]}, {"required": ["b", "c"]}]},
        {"properties": free, "minProperties": 1},
        {"properties": free, "minProperties": 2},
        {"properties": free, "minProperties": 3, "required": ["b"]},
        {"properties": free, "dependentRequired": {"a": ["c"], "b": ["a"]}},
        {"properties": free, "not": {"required": ["a", "b"]}},
        {"properties": free, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"oneOf": [{"properties": {"a": {"const": True}}, "required": ["a"]},
                   {"properties": {"b": {"const": True}}, "required": ["b"],
                    "additionalProperties": False}]},
    ]  # fmt: skip
    for schema, fmt in itertools.product(schemas[:-1], ("v32", "glm")):
        whole = {"type": "object", "additionalProperties": False, **schema}
        found = tool_grammar([Tool("f", whole)], "required", FORMATS[fmt], {}, parallel=False)
        assert found is not None
        table = worker.form_of("calls", found.calls, VOCABULARY)
        assert isinstance(table, Grammar), schema
        for names in (c for n in range(4) for c in itertools.combinations("abc", n)):
            right = jsonschema.Draft202012Validator(whole).is_valid(dict.fromkeys(names, True))
            assert takes(table, written(fmt, names)) == right, (schema, names)


def written(fmt: str, names: tuple[str, ...]) -> str:
    how = FORMATS[fmt]
    each = (f"{how.key_begin}{one}{how.key_end_json}true{how.value_end}" for one in names)
    inside = f"{how.call_begin}f{how.name_end}{''.join(each)}{how.call_end}"
    return f"{how.begin}{inside}{how.end}"


def takes(table: Grammar, text: str) -> bool:
    cells = np.frombuffer(table.table, dtype=np.int16)
    kinds, lines = cells[: len(VOCABULARY)], cells[len(VOCABULARY) :]
    lines, state = lines.reshape(table.states, table.classes + 1), table.start
    for byte in text.encode():
        state = lines[state, kinds[byte]]
        if state < 0:
            return False
    return bool(lines[state, -1])


def test_a_text_of_digits_stays_text_wherever_its_schema_stands() -> None:
    """GLM writes a text as any other value: the schema alone tells them apart."""
    code = {"type": "string", "pattern": "^[0-9]{3}$"}
    schemas: list[dict[str, Any]] = [
        {"properties": {"c": {"$ref": "#/$defs/code"}}, "$defs": {"code": code}},
        {"properties": {"c": {"anyOf": [code, {"const": "none"}]}}},
        {"anyOf": [{"properties": {"c": code}, "required": ["c"]}, {"properties": {"d": True}}]},
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"c": {"type": ["string"]}}}}},
        {"allOf": [{"properties": {"c": code}}, {"required": ["c"]}]},
    ]
    text = "<tool_call>f<arg_key>c</arg_key><arg_value>007</arg_value></tool_call>"
    for schema in schemas:
        parser = GLM_MARKUP.parser([Offered("f", None, {"type": "object", **schema})])
        events = [*parser.push(text), *parser.finish()]
        said = "".join(event.text for event in events if isinstance(event, CallDelta))
        assert json.loads(said) == {"c": "007"}, schema


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 0},
        {"maximum": 0},
        {"exclusiveMinimum": 0},
        {"exclusiveMaximum": 0},
        {"minimum": 0, "maximum": 1},
        {"exclusiveMinimum": 0, "maximum": 1},
        {"minimum": -90, "maximum": 90},
        {"minimum": -0.5, "maximum": 0.25},
        {"minimum": 0.25, "exclusiveMaximum": 12.5},
        {"minimum": -20.75, "maximum": -3},
        {"exclusiveMinimum": -7.25, "exclusiveMaximum": -0.1},
        {"minimum": 100, "maximum": 1005},
        {"minimum": 5, "exclusiveMinimum": 5},
        {"minimum": 1e-05},
        {"maximum": 0.105},
        {"minimum": 3, "maximum": 3},
    ],
    ids=str,
)
def test_bounds_of_numbers_are_kept_to_the_digit(bounds: dict[str, Any]) -> None:
    schema = {"type": "number", **bounds}
    automaton = worker.automaton_of(worker.regex_of("json_schema", json.dumps(schema)))
    checker = jsonschema.Draft202012Validator(schema)
    parts = ["", ".0", ".1", ".10", ".05", ".25", ".250", ".249", ".2501", ".5", ".75", ".76",
             ".99", ".105", ".1050", ".1051", ".00001", ".000009", ".000010"]  # fmt: skip
    for sign, whole, part in itertools.product(
        ("", "-"), (0, 1, 3, 4, 5, 6, 7, 12, 13, 20, 89, 90, 91, 99, 100, 101, 1005, 1006), parts
    ):
        text = f"{sign}{whole}{part}"
        right = checker.is_valid(json.loads(text))
        if sign and not float(text):
            assert right or not walks(automaton, text)  # a zero needs no sign
        else:
            assert walks(automaton, text) == right, text


def walks(automaton: ByteAutomaton, text: str) -> bool:
    state = automaton.start
    for byte in text.encode():
        state = int(automaton.following[state, byte])
    return bool(automaton.ends[state])


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ['"a\\nb"', '"\\t\\"\\\\\\/"'], ['"a\nb"', '"\\x"']),
        ({"type": "string", "maxLength": 2}, ['"\\n\\n"'], ['"\\n\\nx"']),
        ({"type": "string", "format": "date-time"}, ['"2026-11-30T23:59:59Z"'], ['"2026-11-30"']),
        ({"type": "string", "format": "email"}, ['"a@b.org"'], ['"a@b"', '"a"b@c.org"']),
        ({"type": "object", "additionalProperties": {"type": "integer"}},
         ["{}", '{"a": 1}', '{"a":1, "b c\\n": 2}'], ['{"a": "1"}', '{"a": 1,}', "{a: 1}"]),
        ({"type": "object", "properties": {}, "additionalProperties": False}, ["{}"], ['{"a": 1}']),
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
          "minProperties": 1}, ['{"a":null}', '{"b":null}', '{"a":null,"b":null}'], ["{}"]),
    ],
    ids=str,
)  # fmt: skip
def test_json_that_tables_did_not_hold_before(schema: Any, good: list[str], bad: list[str]) -> None:
    automaton = worker.automaton_of(worker.regex_of("json_schema", json.dumps(schema)))
    for text in good:
        assert walks(automaton, text), text
        jsonschema.validate(json.loads(text), schema)
    for text in bad:
        assert not walks(automaton, text), text


@pytest.mark.parametrize(
    "calls",
    ["", "{", "[]", "{}", '{"start": ["said"]}', '{"start": ["rule", "x"], "rules": {}}',
     '{"start": ["until", "a"], "rules": {}}', '{"start": ["many"], "rules": {}}',
     '{"start": ["json", {"type": "strange"}], "rules": {}}', '{"start": "x", "rules": {}}',
     '{"start": ["word", "(" ], "rules": {}}', '{"start": ["said", -1], "rules": {}}',
     '{"start": ["said", 300], "rules": {}}',
     '{"start": ["rule", "x"], "rules": {"x": ["rule", "x"]}}'],
)  # fmt: skip
def test_what_is_no_grammar_of_calls_is_refused(calls: str) -> None:
    with pytest.raises((worker.Refusal, RequestError)):
        worker.form_of("calls", calls, VOCABULARY)


def test_what_would_take_long_to_make_a_table_of_is_followed_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llguidance")
    found = tool_grammar([Tool("get_time", DEFINITIONS["get_time"])], "required", GLM, CONTROL)
    assert found is not None
    assert isinstance(worker.form_of("calls", found.calls, VOCABULARY), Grammar)
    monkeypatch.setattr("freewheel.structured.tables.MAX_STEPS", 20 * len(VOCABULARY))
    assert isinstance(worker.form_of("calls", found.calls, VOCABULARY), HostGrammar)


def test_a_forced_call_takes_drafts_and_says_the_same_as_without() -> None:
    pytest.importorskip("llguidance")
    small: dict[str, Any] = {"chunk": 32, "context_len": 1024, "max_batch": 2, "graph": "eager"}
    outputs = []
    for speculate in (0, 3):
        with LLM("demo", speculate=speculate, **small) as llm:
            dsml = llm.tokenizer.token_id("｜DSML｜")
            control = {} if dsml is None else {"｜DSML｜": dsml}
            tool = Tool("get_weather", DEFINITIONS["get_weather"])
            found = tool_grammar([tool], "required", DSML_V32, control, parallel=False)
            assert found is not None
            params = SamplingParams(temperature=0, max_tokens=300, calls=found.calls)
            outputs += llm.generate("What is the weather in Rome?", params)
    alone, drafted = outputs
    assert drafted.token_ids == alone.token_ids
    assert drafted.metrics.form == alone.metrics.form == "device"
    assert drafted.metrics.drafted > 0 and drafted.metrics.accepted > 0
    assert drafted.metrics.rounds < alone.metrics.rounds
