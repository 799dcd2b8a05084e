# SPDX-License-Identifier: Apache-2.0
"""Thoughts, text and calls of a scripted answer land in their fields, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freewheel.spec import FinishReason
from tests.server.scripted import Script

D = "｜DSML｜"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
NAMES = ("get_weather", "ping")
CHAT_TOOLS = [
    {"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in NAMES
]
CLAUDE_TOOLS = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
RESPONSES_TOOLS = [{"type": "function", "name": n, "parameters": PARAMETERS} for n in NAMES]
ASKED: Any = [{"role": "user", "content": "Rome?"}]
ARGUMENTS = {"city": "Rome <&> 2>&1 é", "days": 3}
CALL = (
    f'<{D}invoke name="get_weather">\n<{D}parameter name="city" string="true">'
    f'{ARGUMENTS["city"]}</{D}parameter>\n<{D}parameter name="days" string="false">3</{D}parameter>'
    f"\n</{D}invoke>\n"
)
PING = f'<{D}invoke name="ping">\n</{D}invoke>\n'
BLOCK = f"\n\n<{D}function_calls>\n{CALL}{PING}</{D}function_calls>"
THINKING: Any = {"chat_template_kwargs": {"thinking": True}}


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


def chat(script: Script, **body: Any) -> dict[str, Any]:
    """(thoughts, content, calls, finish) of a chat, which must be the same in a stream."""
    asked = {"messages": ASKED, "tools": CHAT_TOOLS} | body
    found = script.post("/v1/chat/completions", **asked)
    assert found.status_code == 200, found.text
    (choice,) = found.json()["choices"]
    message = choice["message"]
    whole = {
        "thoughts": message.get("reasoning_content", ""),
        "content": message["content"] or "",
        "calls": [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ],
        "finish": choice["finish_reason"],
    }
    assert message.get("tool_calls") != []
    streamed: dict[str, Any] = {"thoughts": "", "content": "", "calls": [], "finish": None}
    for chunk in script.events("/v1/chat/completions", **asked):
        (one,) = chunk["choices"]
        delta = one["delta"]
        assert streamed["finish"] is None, "nothing comes behind the finish"
        streamed["thoughts"] += delta.get("reasoning_content", "")
        streamed["content"] += delta.get("content") or ""
        streamed["finish"] = one["finish_reason"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(streamed["calls"]) and call["type"] == "function"
                streamed["calls"].append((call["function"]["name"], ""))
            name, arguments = streamed["calls"][call["index"]]
            streamed["calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
    assert streamed == whole
    return whole


@pytest.mark.parametrize("each", [1, 2, 5, 1000])
def test_a_chat_tells_calls_from_text(script: Script, each: int) -> None:
    script.script(f"I look.{BLOCK}", each=each)
    found = chat(script)
    assert (found["content"], found["finish"]) == ("I look.", "tool_calls")
    [(first, arguments), second] = found["calls"]
    assert (first, json.loads(arguments), second) == ("get_weather", ARGUMENTS, ("ping", "{}"))


def test_arguments_come_as_they_are_written(script: Script) -> None:
    script.script(BLOCK)
    events = script.events("/v1/chat/completions", messages=ASKED, tools=CHAT_TOOLS)
    deltas = [
        call["function"]["arguments"]
        for chunk in events
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        if call["index"] == 0
    ]
    assert len(deltas) > 6, "one piece for nearly every token of the text"


@pytest.mark.parametrize(
    ("said", "thinks", "expected"),
    [
        ("t</think>c", True, ("t", "c")),
        ("c", False, ("", "c")),
        ("t", True, ("t", "")),
        (f"t</think>c{BLOCK}", True, ("t", "c")),
        (f"c{BLOCK}", False, ("", "c")),
    ],
)
@pytest.mark.parametrize("after_tool", [False, True])
@pytest.mark.parametrize("stop", [[], ["zzzzzzzz"]])
def test_thoughts_and_answer_land_in_their_fields(
    script: Script, said: str, thinks: bool, expected: tuple[str, str], after_tool: bool, stop: Any
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    turns = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "pong"},
    ]
    script.script(said)
    found = chat(
        script, messages=turns if after_tool else ASKED, stop=stop, **(THINKING if thinks else {})
    )
    assert (found["thoughts"], found["content"]) == expected
    assert found["finish"] == ("tool_calls" if BLOCK in said else "stop")


def test_a_cut_call_is_a_length_and_its_arguments_are_what_came(script: Script) -> None:
    script.script(BLOCK[: BLOCK.index(" 2>&1")], FinishReason.LENGTH)
    found = chat(script)
    assert found["finish"] == "length"
    assert found["calls"] == [("get_weather", '{"city": "Rome <&>')]


@pytest.mark.parametrize(
    "said",
    [
        BLOCK.replace("get_weather", "rm"),
        BLOCK.replace(f"{D}function_calls>\n", f"{D}function_calls>\nwords", 1),
        f"\n\n<{D}function_calls>",
        f"<{D}",
    ],
)
def test_what_is_no_call_is_content_whole(script: Script, said: str) -> None:
    script.script(said)
    assert chat(script) == {"thoughts": "", "content": said, "calls": [], "finish": "stop"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "ping"}}])
def test_an_answer_held_to_calls_shows_no_markup_wherever_it_is_cut(
    script: Script, choice: Any
) -> None:
    for end in range(1, len(BLOCK), 9):
        script.script(BLOCK[:end], FinishReason.LENGTH)
        found = chat(script, tool_choice=choice)
        assert (found["content"], found["finish"]) == ("", "length")
    script.script(BLOCK[: BLOCK.index('="true"')], FinishReason.LENGTH)
    body = {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 9}
    message = script.post("/v1/messages", messages=ASKED, **body).json()
    assert message["content"] == [{"type": "text", "text": ""}]


def test_without_tools_nothing_is_markup(script: Script) -> None:
    script.script(BLOCK)
    for body in ({"tool_choice": "none"}, {"tools": []}):
        found = chat(script, **body)
        assert found["calls"] == [] and found["finish"] == "stop"
        assert "get_weather" in found["content"]


def test_one_call_at_most_ends_the_answer(script: Script) -> None:
    script.script(BLOCK + " and more")
    found = chat(script, parallel_tool_calls=False)
    assert [name for name, _ in found["calls"]] == ["get_weather"]
    assert (found["content"], found["finish"]) == ("", "tool_calls")


def test_calls_have_ids_of_their_own(script: Script) -> None:
    script.script(BLOCK)
    found = script.post("/v1/chat/completions", messages=ASKED, tools=CHAT_TOOLS, n=3).json()
    ids = [call["id"] for choice in found["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids) == 6


def test_pieces_for_the_page_hold_no_markup(script: Script) -> None:
    script.script(f"I look.{BLOCK}")
    events = script.events(
        "/v1/chat/completions", messages=ASKED, tools=CHAT_TOOLS, return_pieces=True
    )
    pieces = [piece for chunk in events for piece in chunk["choices"][0].get("pieces", ())]
    assert "".join(text for text, _, _ in pieces) == "I look."


def test_messages_have_blocks_of_calls(script: Script) -> None:
    script.script(f"t</think>I look.{BLOCK}")
    body: Any = {
        "messages": ASKED, "max_tokens": 1000, "tools": CLAUDE_TOOLS,
        "thinking": {"type": "adaptive"},
    }  # fmt: skip
    found = script.post("/v1/messages", **body).json()
    assert found["stop_reason"] == "tool_use"
    thought, text, call, ping = found["content"]
    assert (thought["thinking"], text["text"]) == ("t", "I look.")
    assert (call["name"], call["input"], ping["input"]) == ("get_weather", ARGUMENTS, {})
    blocks: list[dict[str, Any]] = []
    for one in script.events("/v1/messages", **body):
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks.append(one["content_block"] | {"json": ""})
        elif one["type"] == "content_block_delta":
            delta = one["delta"]
            field, value = next((k, v) for k, v in delta.items() if k != "type")
            block = blocks[one["index"]]
            field = "json" if field == "partial_json" else field
            block[field] += value
        elif one["type"] == "message_delta":
            assert one["delta"]["stop_reason"] == "tool_use"
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("t", "I look.")
    assert [json.loads(block["json"]) for block in blocks[2:]] == [ARGUMENTS, {}]


def test_a_cut_call_of_a_message_has_the_arguments_that_are_whole(script: Script) -> None:
    script.script(BLOCK[: BLOCK.index('days" string="false">3') + 22], FinishReason.LENGTH)
    body: Any = {"messages": ASKED, "max_tokens": 1000, "tools": CLAUDE_TOOLS}
    found = script.post("/v1/messages", **body).json()
    (call,) = found["content"]
    assert found["stop_reason"] == "max_tokens"
    assert call["input"] == {"city": ARGUMENTS["city"]}


def test_responses_have_items_of_calls(script: Script) -> None:
    script.script(f"t</think>I look.{BLOCK}")
    body: Any = {"input": "Rome?", "tools": RESPONSES_TOOLS, "reasoning": {"effort": "low"}}
    found = script.post("/v1/responses", **body).json()
    thought, message, call, ping = found["output"]
    assert thought["content"][0]["text"] == "t" and message["content"][0]["text"] == "I look."
    assert json.loads(call["arguments"]) == ARGUMENTS and ping["arguments"] == "{}"
    assert call["status"] == "completed" and call["call_id"] != ping["call_id"]
    events = script.events("/v1/responses", **body)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    added = [one["output_index"] for one in events if one["type"] == "response.output_item.added"]
    assert added == [0, 1, 2, 3]
    assert done == events[-1]["response"]["output"]
    kind = "response.function_call_arguments.delta"
    deltas = [one["delta"] for one in events if one["type"] == kind and one["output_index"] == 2]
    assert json.loads("".join(deltas)) == ARGUMENTS and len(deltas) > 6


def test_earlier_calls_reach_the_model_alike_through_all_three(script: Script) -> None:
    script.script("Sunny.")
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    function = {"name": "get_weather", "arguments": arguments}
    chat_turns = [
        {"role": "system", "content": "Be brief."}, *ASKED,
        {
            "role": "assistant", "content": "I look.", "reasoning_content": "t",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
    ]  # fmt: skip
    blocks = [
        {"type": "thinking", "thinking": "t"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "get_weather", "input": ARGUMENTS},
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "text", "text": "sun"}],
    }
    turns = [
        *ASKED,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    items = [
        *ASKED,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "a", **function},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
    ]
    script.link.asked.clear()
    requests: Any = [
        ("/v1/chat/completions", {"messages": chat_turns, "tools": CHAT_TOOLS} | THINKING),
        (
            "/v1/messages",
            {
                "messages": turns, "system": "Be brief.", "max_tokens": 9, "tools": CLAUDE_TOOLS,
                "thinking": {"type": "adaptive"},
            },
        ),
        (
            "/v1/responses",
            {
                "input": items, "instructions": "Be brief.", "tools": RESPONSES_TOOLS,
                "reasoning": {"effort": "high"},
            },
        ),
    ]  # fmt: skip
    for path, body in requests:
        found = script.post(path, **body)
        assert found.status_code == 200, found.text
    first, second, third = (prompt for prompt, _ in script.link.asked)
    assert first == second == third
    text = script.tokenizer.decode(first, False)
    assert "<think>t</think>I look." in text and "<result>sun</result>" in text
    tokens = script.post("/tokenize", messages=chat_turns, tools=CHAT_TOOLS, **THINKING).json()
    assert tokens["tokens"] == first


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"properties": {"x": found}}
    return found


NAMED = {"type": "function", "function": {"name": "g"}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "x"}
MADE = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": function(name="a b")}, "tools"),
    ({"tools": function(name="x" * 65)}, "tools"),
    ({"tools": function(name='x"><')}, "tools"),
    ({"tools": function(description="x" * 70_000)}, "tools"),
    ({"tools": function(parameters=[])}, "tools"),
    ({"tools": function(parameters={"x": "y" * 70_000})}, "tools"),
    ({"tools": function(parameters=nested(40))}, "tools"),
    ({"tools": function() * 2}, "tools"),
    ({"tools": [function(name=f"f{n}")[0] for n in range(129)]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": function(), "tool_choice": "any"}, "tool_choice"),
    ({"tools": function(), "tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": function(), "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": function(), "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template_kwargs": {"clear_thinking": False}}, "chat_template_kwargs"),
    ({"messages": [*ASKED, RESULT]}, "messages"),
    ({"messages": [*ASKED, {"role": "assistant", "tool_calls": MADE}]}, "messages"),
    ({"messages": [*ASKED, {"role": "assistant", "tool_calls": MADE}, *ASKED]}, "messages"),
    ({"messages": [*ASKED, {"role": "assistant", "tool_calls": MADE * 2}, RESULT]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": MADE}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages"),
    ({"messages": [*ASKED, {"role": "assistant"}, *ASKED]}, "messages"),
    ({"messages": [*ASKED, {"role": "tool", "content": "x"}]}, "messages"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=range(len(REFUSED)))
def test_tools_out_of_bounds_are_refused_by_field(
    script: Script, body: dict[str, Any], field: str
) -> None:
    script.script("x")
    found = script.post("/v1/chat/completions", **({"messages": ASKED} | body))
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert (error["param"].split(".")[0], error["type"]) == (field, "invalid_request_error")
    assert error["message"].startswith(f"{error['param']}: ")


def test_anthropics_tools_are_refused_in_its_own_words(script: Script) -> None:
    script.script("x")
    tool = {"name": "f", "input_schema": {"type": "object"}}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    wrong: list[dict[str, Any]] = [
        {"tools": [tool, tool]},
        {"tools": [tool], "tool_choice": {"type": "tool"}},
        {"tools": [tool], "tool_choice": {"type": "tool", "name": "g"}},
        {"tools": [{"name": "f"}]},
        {"messages": [{"role": "user", "content": [use]}]},
    ]  # fmt: skip
    for body in wrong:
        found = script.post("/v1/messages", **({"messages": ASKED, "max_tokens": 5} | body))
        assert found.status_code == 400, found.text
        assert found.json()["error"]["type"] == "invalid_request_error"
