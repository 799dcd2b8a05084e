# SPDX-License-Identifier: Apache-2.0
"""An answer goes on with the last turn, however a client of another server asks for that."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.scripted import Script

ASKED: Any = [{"role": "user", "content": "Rome?"}]
BEGUN = "It is "
OPEN: Any = [*ASKED, {"role": "assistant", "content": BEGUN}]
MARKED: Any = [*ASKED, {"role": "assistant", "content": BEGUN, "prefix": True}]


@pytest.fixture(scope="module")
def script() -> Script:
    found = Script()
    found.script("sunny.")
    return found


@pytest.fixture(scope="module")
def want(script: Script) -> list[int]:
    """The prompt that asks, and the text that was begun behind it."""
    asked = script.post("/tokenize", messages=ASKED).json()["tokens"]
    begun = script.post("/tokenize", prompt=BEGUN, add_special_tokens=False).json()["tokens"]
    return asked + begun


WAYS: list[dict[str, Any]] = [
    {"messages": OPEN, "continue_final_message": True},
    {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": False},
    {"messages": MARKED},
    {"messages": MARKED, "continue_final_message": True},
]


@pytest.mark.parametrize("body", WAYS, ids=range(len(WAYS)))
def test_the_prompt_ends_with_what_was_begun(
    script: Script, want: list[int], body: dict[str, Any]
) -> None:
    assert script.post("/tokenize", **body).json()["tokens"] == want
    found = script.post("/v1/chat/completions", **body, return_token_ids=True).json()
    assert found["prompt_token_ids"] == want
    assert found["choices"][0]["message"]["content"] == "sunny."


def test_thoughts_go_on_as_thoughts(script: Script) -> None:
    thoughts = [*ASKED, {"role": "assistant", "content": "", "reasoning_content": "Hm, "}]
    script.script("warm.</think>Sunny.")
    body = {"messages": thoughts, "chat_template_kwargs": {"thinking": True}}
    found = script.post("/v1/chat/completions", **body, continue_final_message=True).json()
    message = found["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("warm.", "Sunny.")
    script.script("sunny.")


def test_a_last_turn_of_the_assistant_goes_on_in_anthropics_words(
    script: Script, want: list[int]
) -> None:
    counted = script.post("/v1/messages/count_tokens", messages=OPEN).json()
    assert counted["input_tokens"] == len(want)
    found = script.post("/v1/messages", messages=OPEN, max_tokens=9).json()
    assert found["content"] == [{"type": "text", "text": "sunny."}]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": OPEN}, "messages"),
    ({"messages": ASKED, "continue_final_message": True}, "messages"),
    ({"messages": MARKED, "continue_final_message": False}, "continue_final_message"),
    ({"messages": MARKED, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": ASKED, "add_generation_prompt": False}, "add_generation_prompt"),
    ({"messages": [*MARKED, *ASKED]}, "messages"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_go_on_is_refused_by_its_field(
    script: Script, body: dict[str, Any], field: str
) -> None:
    found = script.post("/v1/chat/completions", **body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["param"].split(".")[0] == field
    assert error["message"].startswith(error["param"])
