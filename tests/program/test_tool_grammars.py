# SPDX-License-Identifier: Apache-2.0
"""Grammars of tool calls accept what the family writes, and nothing that is no valid call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from freewheel.errors import RequestError
from freewheel.spec import Grammar
from freewheel.structured import (
    DSML_V32,
    GLM,
    JSON_CALLS,
    Tool,
    ToolFormat,
    ToolGrammar,
    tool_grammar,
)

following = pytest.importorskip("freewheel.structured.following")
worker = pytest.importorskip("freewheel.structured.worker")

DSML = 300
CONTROL = {"｜DSML｜": DSML, "<arg_key>": 301, "</arg_key>": 302, "<tool_call>": 303}
VOCABULARY: list[bytes | None] = [*(bytes([n]) for n in range(256)), *[None] * 48]
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city", "days"],
    },
)
PING = Tool("ping", {"type": "object", "properties": {}})
ANY = Tool("log", None)


def tokens_of(text: str, control: dict[str, int]) -> list[int]:
    for name, token in control.items():
        if name in text:
            head, tail = text.split(name, 1)
            return [*tokens_of(head, control), token, *tokens_of(tail, control)]
    return list(text.encode())


def accepts(found: ToolGrammar | None, text: str, control: dict[str, int]) -> bool:
    """Whether the grammar takes `text`, which begins where it does, as a whole answer.

    The host's way; where there is a table, it says the same.
    """
    assert found is not None
    tokens = tokens_of(text, control)
    followed = follows(found, tokens)
    table = table_of(found.calls)
    assert table is None or walked(table, tokens) == followed, text
    return followed


def follows(found: ToolGrammar, tokens: list[int]) -> bool:
    tokenizer = following.tokenizer_of(VOCABULARY)
    source = worker.followed("calls", found.calls, VOCABULARY).source
    matcher = following.matcher_of(source, tokenizer)
    for token in tokens:
        mask = matcher.compute_bitmask()
        if not mask[token // 8] >> token % 8 & 1:
            return False
        matcher.consume_token(token)
    return matcher.is_accepting()


@cache
def table_of(calls: str) -> Grammar | None:
    form = worker.form_of("calls", calls, VOCABULARY)
    return form if isinstance(form, Grammar) else None


def walked(table: Grammar, tokens: list[int]) -> bool:
    cells = np.frombuffer(table.table, dtype=np.int16)
    kinds, lines = cells[: len(VOCABULARY)], cells[len(VOCABULARY) :]
    lines, state = lines.reshape(table.states, table.classes + 1), table.start
    for token in tokens:
        state = lines[state, kinds[token]]
        if state < 0:
            return False
    return bool(lines[state, -1])


def dsml(name: str, *fields: tuple[str, bool, str]) -> str:
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if text else "false"}">'
        f"{value}</｜DSML｜parameter>\n"
        for key, text, value in fields
    )
    return f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>\n'


def block(*calls: str) -> str:
    return f"<｜DSML｜function_calls>\n{''.join(calls)}</｜DSML｜function_calls>"


def glm(name: str, *fields: tuple[str, bool, str]) -> str:
    inside = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, _, value in fields
    )
    return f"<tool_call>{name}{inside}</tool_call>"


def hermes(name: str, *fields: tuple[str, bool, str]) -> str:
    inside = ", ".join(
        f'"{key}": ' + (f'"{value}"' if text else value) for key, text, value in fields
    )
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{inside}}}}}\n</tool_call>'


CITY, DAYS = ("city", True, "Bern a < b"), ("days", False, "3")
FORMATS = [
    pytest.param(DSML_V32, dsml, block, id="dsml"),
    pytest.param(GLM, glm, lambda *calls: "".join(calls), id="glm"),
    pytest.param(JSON_CALLS, hermes, lambda *calls: "\n".join(calls), id="json"),
]
CONTROLS = [pytest.param(CONTROL, id="control"), pytest.param({}, id="text")]
Write = Callable[..., str]


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(("fmt", "call", "calls"), FORMATS)
def test_valid_calls_pass_and_others_do_not(
    fmt: ToolFormat, call: Write, calls: Write, control: dict[str, int]
) -> None:
    found = tool_grammar([WEATHER, PING], "required", fmt, control)
    good = call("get_weather", CITY, DAYS)
    assert accepts(found, calls(good), control)
    assert accepts(found, calls(good, call("ping"), good), control)
    assert accepts(found, calls(call("get_weather", CITY, DAYS, ("unit", True, "F"))), control)
    tags = ("tags", False, '["a", "b"]')
    assert accepts(found, calls(call("get_weather", CITY, DAYS, tags)), control)
    for bad in (
        call("get_weather", CITY),  # an argument is missing
        call("get_weather", CITY, ("days", False, "30")),
        call("get_weather", CITY, DAYS, ("unit", True, "K")),
        call("get_weather", CITY, DAYS, ("colour", True, "red")),
        call("nobody"),
        good[:-3],
        "",
    ):
        assert not accepts(found, calls(bad), control), bad
    assert not accepts(found, "Hello " + calls(good), control)
    assert not accepts(found, calls(good) + " there", control)


@pytest.mark.parametrize(("fmt", "call", "calls"), FORMATS)
def test_one_call_or_a_named_one_is_kept(fmt: ToolFormat, call: Write, calls: Write) -> None:
    one = tool_grammar([WEATHER, PING], "required", fmt, CONTROL, parallel=False)
    assert accepts(one, calls(call("ping")), CONTROL)
    assert not accepts(one, calls(call("ping"), call("ping")), CONTROL)
    named = tool_grammar([WEATHER, PING], "function:ping", fmt, CONTROL)
    assert accepts(named, calls(call("ping")), CONTROL)
    assert not accepts(named, calls(call("get_weather", CITY, DAYS)), CONTROL)


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(("fmt", "call", "calls"), FORMATS)
def test_with_auto_text_is_free_and_a_call_is_valid(
    fmt: ToolFormat, call: Write, calls: Write, control: dict[str, int]
) -> None:
    whole = tool_grammar([WEATHER, PING], "auto", fmt, control, whole=True)
    assert whole is not None and whole.trigger is None
    good = calls(call("ping"), call("get_weather", CITY, DAYS))
    for text in ("", "No <b>call</b> {}", good, "I look. " + good, "a < b\n" + calls(call("ping"))):
        assert accepts(whole, text, control), text
    for text in ("I look. " + calls(call("nobody")), good + " there", good[:-2]):
        assert not accepts(whole, text, control), text
    found = tool_grammar([WEATHER, PING], "auto", fmt, control)
    assert found is not None
    mark = next((name for name in control if name in fmt.opening), None)
    assert found.trigger == (None if mark is None else control[mark])
    if mark is not None:
        assert accepts(found, good.split(mark, 1)[1], control)
        assert not accepts(found, calls(call("nobody")).split(mark, 1)[1], control)


@pytest.mark.parametrize(("fmt", "call", "calls"), FORMATS)
def test_a_tool_without_a_schema_takes_any_arguments(
    fmt: ToolFormat, call: Write, calls: Write
) -> None:
    found = tool_grammar([ANY], "required", fmt, CONTROL)
    assert accepts(
        found, calls(call("log", ("level", False, "[1, {}]"), ("t", True, "x"))), CONTROL
    )
    assert accepts(found, calls(call("log")), CONTROL)


def test_no_tools_and_none_ask_for_nothing() -> None:
    assert tool_grammar([WEATHER], "none", GLM, CONTROL) is None
    assert tool_grammar([], "auto", GLM, CONTROL) is None


@pytest.mark.parametrize(
    ("field", "tools", "choice"),
    [
        ("tools", [], "required"),
        ("tools", [Tool("two words")], "auto"),
        ("tools", [PING, PING], "auto"),
        ("tools", [Tool("x", {"properties": {"a<b": True}})], "auto"),
        ("tools", [Tool("x", {"properties": {}, "required": ["a"]})], "auto"),
        ("tool_choice", [PING], "function:pong"),
        ("tool_choice", [PING], "sometimes"),
    ],
)
def test_wrong_tools_are_refused_by_name(field: str, tools: list[Any], choice: str) -> None:
    with pytest.raises(RequestError) as caught:
        tool_grammar(tools, choice, GLM, CONTROL)
    assert caught.value.field == field


def argument(**schema: Any) -> list[Tool]:
    return [Tool("x", {"type": "object", "properties": {"a": schema}, "required": ["a"]})]


@pytest.mark.parametrize("fmt", [DSML_V32, GLM, JSON_CALLS])
def test_notes_of_vendors_and_idle_words_change_nothing(fmt: ToolFormat) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}}
    plain = tool_grammar(argument(**numbers), "required", fmt, CONTROL)
    noted = numbers | {"x-order": 1, "example": [1], "uniqueItems": False, "nullable": False}
    assert tool_grammar(argument(**noted), "required", fmt, CONTROL) == plain


@pytest.mark.parametrize("fmt", [DSML_V32, GLM, JSON_CALLS])
@pytest.mark.parametrize(
    ("tools", "word"),
    [
        (argument(type="string", maxLenght=3), "maxLenght"),
        (argument(type="array", items={"type": "integer", "minumum": 1}), "minumum"),
        (argument(anyOf=[{"type": "string", "startsWith": "a"}, {"type": "null"}]), "startsWith"),
        ([Tool("x", {"type": "object", "properties": {}, "nullable": True})], "nullable"),
    ],
)
def test_what_nobody_enforces_in_a_tool_is_refused_by_name(
    fmt: ToolFormat, tools: list[Tool], word: str
) -> None:
    with pytest.raises(RequestError, match=f"{word}.*would not be enforced") as caught:
        tool_grammar(tools, "required", fmt, CONTROL)
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    ("tools", "word"),
    [
        (argument(type="string", format="hostname"), "hostname"),
        (argument(type="string", pattern="^a+$", maxLength=3), "pattern"),
        (argument(type="string", contentEncoding="base64"), "contentEncoding"),
        ([Tool("x", {"properties": {"a": {}, "b": {}}, "maxProperties": 1})], "maxProperties"),
        ([Tool("x", {"properties": {"a": {}}, "minProperties": 2})], "minProperties"),
        ([Tool("x", {"type": "array", "items": {}})], "type 'array'|'items'"),
        (
            [Tool("x", {"anyOf": [{"properties": {"a": {}}}, {"propertyNames": {"const": "a"}}]})],
            "propertyNames",
        ),
    ],
)
def test_what_raw_arguments_cannot_keep_is_refused_by_name(tools: list[Tool], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        tool_grammar(tools, "required", DSML_V32, CONTROL)


def test_references_and_formats_of_raw_arguments_are_kept() -> None:
    schema = {
        "type": "object",
        "properties": {
            "unit": {"$ref": "#/$defs/Unit"},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["unit", "day"],
        "$defs": {"Unit": {"type": "string", "enum": ["C", "F"]}},
    }
    found = tool_grammar([Tool("x", schema)], "required", DSML_V32, CONTROL)

    def call(unit: str, day: str) -> str:
        return block(dsml("x", ("unit", True, unit), ("day", True, day)))

    assert accepts(found, call("C", "2026-11-30"), CONTROL)
    assert not accepts(found, call("K", "2026-11-30"), CONTROL)
    assert not accepts(found, call("C", "today"), CONTROL)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2026-11-30", "2026-13-30"),
        ("time", "23:59:59Z", "24:00:00Z"),
        ("date-time", "2026-11-30T23:59:59.5+01:00", "2026-11-30 23:59"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("ipv4", "127.0.0.1", "256.0.0.1"),
        ("email", "a.b+c@example.org", "a@b"),
        ("uri", "https://example.org/a?b=c#d", "example.org"),
    ],
)
def test_formats_of_raw_arguments_are_texts_of_that_format(name: str, good: str, bad: str) -> None:
    found = tool_grammar(argument(type="string", format=name), "required", GLM, CONTROL)
    assert accepts(found, glm("x", ("a", True, good)), CONTROL)
    assert not accepts(found, glm("x", ("a", True, bad)), CONTROL)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"properties": None}, "'properties' at #, which is not an object"),
        ({"properties": ["a"]}, "'properties' at #, which is not an object"),
        ({"properties": {}, "required": None}, "'required' at #, which is not a list"),
        ({"properties": {"a": {}}, "required": [1]}, "'required' at #, which does not list names"),
        ({"properties": {"a": {"anyOf": None}}}, "'anyOf' at #/properties/a, which is not a list"),
        ({"properties": {"a": {"type": "string", "format": ["date"]}}}, "'format' at #/properties"),
        ({"properties": {"a": {"type": "string", "pattern": 5}}}, "'pattern' at #/properties/a"),
        ({"properties": {"a": {"enum": "abc"}}}, "'enum' at #/properties/a, which is not a list"),
    ],
)
@pytest.mark.parametrize("fmt", [DSML_V32, GLM, JSON_CALLS])
def test_a_schema_with_values_of_the_wrong_kind_is_refused_by_name(
    schema: dict[str, Any], word: str, fmt: ToolFormat
) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        tool_grammar([Tool("f", {"type": "object", **schema})], "required", fmt, CONTROL)
    assert caught.value.field == "tools"
