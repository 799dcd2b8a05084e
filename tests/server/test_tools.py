# SPDX-License-Identifier: Apache-2.0
"""Calls that must be made are made, and are valid, through the clients that people have.

The demo models know no tools: what holds their answers to a call is its grammar.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from freewheel.chat import V32_MARKUP
from freewheel.server.held import structure_of_calls
from freewheel.server.tools import (
    AllowedFunctions,
    AllowedTools,
    Chosen,
    FunctionTool,
    NamedTool,
    calling_of,
    choice_of,
)
from tests.server.running import Running
from tests.waiting import PATIENCE

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"dry": {"type": "boolean"}},
    "required": ["dry"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
OTHER: Any = {"type": "function", "function": {"name": "no", "parameters": SCHEMA}}
ASKED: Any = [{"role": "user", "content": "Rome?"}]
COMMON: Any = {"messages": ASKED, "temperature": 0, "max_tokens": 400}


def check(arguments: str) -> None:
    found = json.loads(arguments)
    assert list(found) == ["dry"] and isinstance(found["dry"], bool)


def clients(running: Running) -> tuple[openai.OpenAI, anthropic.Anthropic]:
    return (
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0),
        anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0),
    )


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("v4") / "log"
    with Running(log, model="demo-v4") as running:
        running.wait_until_ready()
        yield running


def test_a_named_tool_is_called_and_its_result_is_taken(server: Running) -> None:
    client, _ = clients(server)
    named: Any = {"type": "function", "function": {"name": "go"}}
    asked: Any = COMMON | {
        "model": "demo", "tools": [OTHER, TOOL], "tool_choice": named, "parallel_tool_calls": False
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "go"
    check(call.function.arguments)
    message = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    turns: Any = [*ASKED, message, result]
    more = client.chat.completions.create(
        model="demo", messages=turns, tools=[TOOL], temperature=0, max_tokens=4
    )
    assert more.choices[0].finish_reason in ("stop", "length")


def test_anthropics_client_gets_a_tool_use_behind_bounded_thoughts(server: Running) -> None:
    _, claude = clients(server)
    asked: Any = {
        "model": "demo", "messages": ASKED, "max_tokens": 400, "extra_body": {"temperature": 0},
        "tools": [{"name": "go", "input_schema": SCHEMA}], "thinking": {
            "type": "enabled", "budget_tokens": 4
        },
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    with claude.messages.stream(**asked) as stream:
        found = stream.get_final_message()
    assert found.stop_reason == "tool_use"
    *_, block = found.content
    assert block.type == "tool_use" and block.name == "go"
    check(json.dumps(block.input))
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "sun"}
    said = [one.model_dump(exclude_none=True) for one in found.content]
    turns: Any = [
        *ASKED,
        {"role": "assistant", "content": said},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    counted = claude.messages.count_tokens(model="demo", messages=turns, tools=asked["tools"])
    assert counted.input_tokens > found.usage.input_tokens


def test_responses_return_a_function_call(server: Running) -> None:
    client, _ = clients(server)
    asked: Any = {
        "model": "demo", "input": "Rome?", "temperature": 0, "max_output_tokens": 400,
        "tools": [{"type": "function", "name": "go", "parameters": SCHEMA, "strict": True}],
        "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    with client.responses.stream(**asked) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and call.name == "go"
    check(call.arguments)
    items: Any = [
        {"role": "user", "content": "Rome?"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
    ]
    more = client.responses.create(
        model="demo", input=items, tools=asked["tools"], max_output_tokens=4, store=False
    )
    assert more.status in ("completed", "incomplete")


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_of_the_allowed_tools_one_is_called(server: Running, protocol: str) -> None:
    client, _ = clients(server)
    named: Any = {"type": "function", "function": {"name": "go"}}
    if protocol == "chat":
        allowed = {"mode": "required", "tools": [named]}
        asked: Any = COMMON | {"model": "demo", "tools": [OTHER, TOOL]}
        asked["parallel_tool_calls"] = False
        asked["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
        found: Any = [one.function for one in calls or []]
    else:
        tools: Any = [one["function"] | {"type": "function"} for one in (OTHER, TOOL)]
        named = {"type": "function", "name": "go"}
        choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
        response: Any = client.responses.create(
            model="demo", input="Rome?", tools=tools, tool_choice=choice, temperature=0,
            max_output_tokens=400, parallel_tool_calls=False, store=False,
        )  # fmt: skip
        found = [one for one in response.output if one.type == "function_call"]
    (call,) = found
    assert call.name == "go"
    check(call.arguments)


def test_tools_that_are_not_allowed_are_told_of_and_cannot_be_called() -> None:
    tools = [FunctionTool(**one).function for one in (OTHER, TOOL)]
    names = [NamedTool(**{"type": "function", "function": {"name": "go"}})]
    for mode in ("auto", "required"):
        wanted: Any = {"mode": mode, "tools": names}
        choice = AllowedTools(type="allowed_tools", allowed_tools=AllowedFunctions(**wanted))
        calling = calling_of(tools, choice_of(choice))
        assert [one.name for one in calling.offered] == ["no", "go"]
        assert [one.name for one in calling.callable] == ["go"]
        held = structure_of_calls(calling, V32_MARKUP, {"<｜DSML｜": 5})
        assert held is not None and 'name=\\"go\\"' in held.wanted["calls"]
        assert 'name=\\"no\\"' not in held.wanted["calls"]
        assert ("grammar_trigger" in held.wanted) == (mode == "auto")
    every = Chosen("auto", ["no", "go"])
    assert structure_of_calls(calling_of(tools, every), V32_MARKUP, {"<｜DSML｜": 5}) is None


def test_an_object_without_a_schema_is_json(server: Running) -> None:
    client, _ = clients(server)
    body = COMMON | {"model": "demo", "max_tokens": 60, "temperature": 1.0, "seed": 5}
    found = client.chat.completions.create(**body, response_format={"type": "json_object"})
    (choice,) = found.choices
    text = choice.message.content or ""
    assert text.lstrip().startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(text), dict)


def test_demo_v4_is_talked_to_thinks_and_calls(v4: Running) -> None:
    client, _ = clients(v4)
    plain = client.chat.completions.create(model="demo-v4", **(COMMON | {"max_tokens": 8}))
    assert plain.choices[0].message.content
    asked: Any = COMMON | {"model": "demo-v4", "max_tokens": 8, "reasoning_effort": "low"}
    thought = client.chat.completions.create(**asked).choices[0].message.model_dump()
    assert thought["reasoning_content"]
    forced: Any = COMMON | {
        "model": "demo-v4", "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False
    }  # fmt: skip
    with client.chat.completions.stream(**forced) as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.type == "function"
    check(call.function.arguments)
    longer = v4.post("/tokenize", messages=ASKED, tools=[TOOL]).json()
    assert longer["count"] > v4.post("/tokenize", messages=ASKED).json()["count"]


def test_demo_v4_answers_in_the_terminal() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "freewheel", "chat", "demo-v4", "--max-tokens", "4", "--json"],
        input=b"hello\nagain\n", capture_output=True, check=True, timeout=PATIENCE,
    )  # fmt: skip
    first, second = map(json.loads, ran.stdout.splitlines())
    assert second["prompt_tokens"] > first["prompt_tokens"] + 3
