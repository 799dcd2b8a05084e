# SPDX-License-Identifier: Apache-2.0
"""Tool calls in an answer's text, whatever pieces it comes in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.chat import (
    Ask,
    CallBegun,
    CallDelta,
    CallEnded,
    Content,
    Event,
    Message,
    Parser,
    Tool,
    ToolCall,
    values_of,
)
from freewheel.chat import deepseek_v32 as v32
from freewheel.chat.dsml import DsmlParser
from freewheel.chat.glm import GlmParser

D = "｜DSML｜"
TOOLS = (
    Tool("get_weather", None, {"properties": {"city": {"type": "string"}, "days": {}}}),
    Tool("get", None, {"properties": {"x": {"type": "string"}}}),
    Tool("ping"),
)
Parsed = tuple[str, list[tuple[str, str, bool]]]
Make = Callable[[], Parser]


def dsml() -> Parser:
    return DsmlParser("function_calls", TOOLS)


def dsml_v4() -> Parser:
    return DsmlParser("tool_calls", TOOLS)


def glm() -> Parser:
    return GlmParser(TOOLS)


def parsed(parser: Parser, pieces: Sequence[str]) -> Parsed:
    """Content, and (name, arguments, whole?) of each call."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    return joined(events)


def joined(events: Sequence[Event]) -> Parsed:
    content, calls = "", list[tuple[str, str, bool]]()
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append((event.name, "", False))
        elif isinstance(event, CallDelta):
            assert event.text and event.index == len(calls) - 1
            name, arguments, _ = calls[-1]
            calls[-1] = (name, arguments + event.text, False)
        else:
            assert isinstance(event, CallEnded)
            calls[event.index] = (*calls[event.index][:2], True)
    return content, calls


def parameter(name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value)
    return f'<{D}parameter name="{name}" string="{str(is_text).lower()}">{text}</{D}parameter>\n'


def invoke(name: str, arguments: dict[str, Any]) -> str:
    inside = "".join(parameter(*one) for one in arguments.items())
    return f'<{D}invoke name="{name}">\n{inside}</{D}invoke>\n'


def block(*calls: str, name: str = "function_calls") -> str:
    return f"\n\n<{D}{name}>\n{''.join(calls)}</{D}{name}>"


WEATHER: dict[str, Any] = {"city": 'a<b && c>d 2>&1 "é"\n</', "days": [1, {"x": None}]}
DSML_TEXT = "Let me see." + block(invoke("get_weather", WEATHER), invoke("ping", {}))
GLM_TEXT = (
    "Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
    f"<arg_value>{WEATHER['city']}</arg_value>\n<arg_key>days</arg_key>\n"
    f"<arg_value>{json.dumps(WEATHER['days'])}</arg_value>\n</tool_call>\n"
    "<tool_call>ping</tool_call>"
)
V4_TEXT = DSML_TEXT.replace("function_calls", "tool_calls")
FAMILIES = [(dsml, DSML_TEXT), (dsml_v4, V4_TEXT), (glm, GLM_TEXT)]


@pytest.mark.parametrize(("make", "text"), FAMILIES)
def test_calls_are_read_whole_and_letter_by_letter_alike(make: Make, text: str) -> None:
    content, calls = parsed(make(), [text])
    assert content == "Let me see."
    assert [(name, whole) for name, _, whole in calls] == [("get_weather", True), ("ping", True)]
    assert json.loads(calls[0][1]) == WEATHER == values_of(calls[0][1])
    assert calls[1][1] == "{}"
    assert parsed(make(), list(text)) == (content, calls)
    for at in range(len(text)):
        assert parsed(make(), [text[:at], text[at:]]) == (content, calls)


FRAGMENTS = [
    f"<{D}function_calls>", f"</{D}function_calls>", f'<{D}invoke name="get', '_weather">', '">',
    f"</{D}invoke>", f'<{D}parameter name="', 'city" string="true">', 'days" string="false">',
    f"</{D}parameter>", "[1, 2]", "{bad", "7", "\n", "\n\n", " ", "<", "</", D, "text", '"', "é😀",
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "get_weather", "get", "ping", "x",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
broken = st.tuples(st.sampled_from([DSML_TEXT, GLM_TEXT]), st.data())


@settings(max_examples=300, deadline=None)
@given(make=st.sampled_from([dsml, glm]), text=texts, data=st.data())
def test_any_text_in_any_pieces_is_read_as_the_whole_one(make: Make, text: str, data: Any) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    ends = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(ends)]
    whole = parsed(make(), [text])
    assert parsed(make(), pieces) == whole
    assert all(json.loads(arguments) == values_of(arguments) for _, arguments, ok in whole[1] if ok)


@settings(max_examples=200, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    at=st.integers(0, 400),
    length=st.integers(0, 3),
    put=st.sampled_from(["", "x", "<", "\n", '"']),
)
def test_a_damaged_call_is_no_error_and_a_whole_one_stays_json(
    family: tuple[Make, str], at: int, length: int, put: str
) -> None:
    make, text = family
    damaged = text[:at] + put + text[at + length :]
    content, calls = parsed(make(), [damaged])
    assert parsed(make(), list(damaged)) == (content, calls)
    for name, arguments, whole in calls:
        assert name in {tool.name for tool in TOOLS}
        assert isinstance(values_of(arguments), dict)
        assert not whole or isinstance(json.loads(arguments), dict)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_without_markup_comes_through_unchanged(text: str) -> None:
    for make in (dsml, dsml_v4, glm):
        assert parsed(make(), list(text)) == (text, [])


@pytest.mark.parametrize(("make", "text"), FAMILIES)
def test_no_more_is_held_back_than_may_be_markup(make: Make, text: str) -> None:
    parser = make()
    shown = ""
    for letter in text[: len("Let me see.")]:
        shown += joined(parser.push(letter))[0]
    assert shown == "Let me see."
    assert joined(parser.push("\n\nNo call. <"))[0] == "\n\nNo call. "
    assert joined(parser.push("b"))[0] == "<b"


@pytest.mark.parametrize(("make", "text"), FAMILIES)
def test_a_text_argument_grows_as_it_comes(make: Make, text: str) -> None:
    parser = make()
    begin = text.index("a<b")
    parser.push(text[:begin])
    assert joined_delta(parser.push("a<b ")) == "a<b "
    assert joined_delta(parser.push('2>&1 "q"')) == '2>&1 \\"q\\"'
    assert joined_delta(parser.push("x</")) == "x"


def joined_delta(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, CallDelta))


CALL = invoke("ping", {})


@pytest.mark.parametrize(
    "text",
    [
        block(invoke("unknown", {"a": 1})),
        block(),
        block("words"),
        f"<{D}function_calls>",
        block(CALL).replace("invoke", "call"),
        block(f'<{D}invoke name="ping">\nwords</{D}invoke>'),
        block(f'<{D}invoke name="ping">\n<{D}parameter name="a">1</{D}parameter></{D}invoke>'),
    ],
)
def test_what_is_no_call_of_a_known_tool_is_content_whole(text: str) -> None:
    assert parsed(dsml(), [text]) == (text, [])


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (parameter("city", "Rome") + f'<{D}parameter name="days" string="false">{{bad</', "Rome"),
        (parameter("city", "Rome") + parameter("city", "Paris"), "Rome"),
        (parameter("city", "Rome") + "words", "Rome"),
    ],
)
def test_a_call_that_breaks_off_is_not_whole(arguments: str, kept: str) -> None:
    text = block(f'<{D}invoke name="get_weather">\n{arguments}</{D}invoke>\n')
    _, [(name, found, whole)] = parsed(dsml(), [text])
    assert (name, whole) == ("get_weather", False)
    assert values_of(found) == {"city": kept}
    with pytest.raises(ValueError):
        json.loads(found)


def test_an_answer_cut_in_a_value_gives_what_is_there() -> None:
    text = block(invoke("get_weather", {"city": "Rome", "days": [1, 2]}))
    _, calls = parsed(dsml(), [text[: text.index("ome") + 2]])
    assert calls == [("get_weather", '{"city": "Rom', False)]
    _, calls = parsed(dsml(), [text[: text.index("[1, 2]") + 4]])
    assert calls == [("get_weather", '{"city": "Rome", "days": [1, ', False)]
    assert values_of(calls[0][1]) == {"city": "Rome"}


def test_one_call_at_most_ends_the_reading() -> None:
    parser = DsmlParser("function_calls", TOOLS, at_most=1)
    content, calls = parsed(parser, [block(CALL, CALL) + "words"])
    assert (content, calls, parser.full) == ("", [("ping", "{}", True)], True)


def test_glm_arguments_are_text_where_the_schema_says_so() -> None:
    def value(key: str, text: str) -> Any:
        inside = f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>"
        call = f"<tool_call>get_weather{inside}</tool_call>"
        _, [(_, arguments, whole)] = parsed(glm(), [call])
        assert whole
        return json.loads(arguments)[key]

    assert value("city", "5") == "5"
    assert value("days", "5") == 5
    assert value("days", "five") == "five"
    assert value("days", " true ") is True


keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters='"'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
objects = st.dictionaries(keys, values, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    content=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    wanted=st.lists(st.tuples(st.sampled_from(TOOLS), objects), min_size=1, max_size=3),
)
def test_encoded_calls_are_read_back(content: str, wanted: list[tuple[Tool, dict]]) -> None:
    calls = tuple(
        ToolCall(str(at), tool.name, json.dumps(given_, ensure_ascii=False))
        for at, (tool, given_) in enumerate(wanted)
    )
    turns = [Message("user", "?"), Message("assistant", content, None, calls)]
    results = [Message("tool", "ok", call_id=call.id) for call in calls]
    text = "".join(piece for piece, _ in v32.render([*turns, *results], Ask()))
    answer = text[text.index(v32.NO_THINK) + len(v32.NO_THINK) : text.index(v32.END)]
    said, found = parsed(dsml(), [answer])
    assert said == content
    assert [(name, json.loads(text), whole) for name, text, whole in found] == [
        (tool.name, given_, True) for tool, given_ in wanted
    ]
