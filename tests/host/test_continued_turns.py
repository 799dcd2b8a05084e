# SPDX-License-Identifier: Apache-2.0
"""A prompt that goes on with the last turn is the one that was asked for, and what it brought."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from freewheel.chat import Ask, Chat, Message, ToolCall, open_chat
from freewheel.errors import RequestError
from tests.host.test_encodings import ASKED, CONTROL, GLM, LETTERS, with_template

END_OF_THOUGHT = LETTERS.token_id("</think>")


@pytest.fixture(scope="module", params=["deepseek_v32", "deepseek_v4", "template"])
def chat(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chat]:
    folder: Path = tmp_path_factory.mktemp("continued")
    if request.param == "template":  # as GLM's own, which keeps the thoughts of the last turn
        kept = GLM.replace("not clear_thinking|default(true)", "loop.last and m.reasoning_content")
        found = with_template(folder, kept)
    else:
        found = open_chat(folder, request.param, LETTERS)
    yield found
    found.close()


def going_on(chat: Chat, turns: Sequence[Message], **ask: Any) -> tuple[list[int], int | None]:
    found = chat.prompt(turns, Ask(continues=True, **ask))
    assert found.start_of_thought is None
    return found.ids, found.end_of_thought


@pytest.mark.parametrize("begun", ["The cap", " The sum: ", "a\n\n", "</think>", "\ufdd0\ufdd1"])
def test_text_goes_on_behind_the_prompt_that_asked_for_it(chat: Chat, begun: str) -> None:
    asked = chat.prompt(ASKED).ids
    found = going_on(chat, [*ASKED, Message("assistant", begun)])
    assert found == (asked + LETTERS.encode_text(begun), None)


def test_thoughts_go_on_until_they_end(chat: Chat) -> None:
    asked = chat.prompt(ASKED, Ask(thinking=True)).ids
    turns = [*ASKED, Message("assistant", "", "Hm, so ")]
    assert going_on(chat, turns, thinking=True) == (
        asked + LETTERS.encode_text("Hm, so "),
        END_OF_THOUGHT,
    )


def test_text_behind_thoughts_goes_on_as_text(chat: Chat) -> None:
    asked = chat.prompt(ASKED, Ask(thinking=True)).ids
    ids, end = going_on(chat, [*ASKED, Message("assistant", "Sun", "Hm.")], thinking=True)
    thoughts = [*LETTERS.encode_text("Hm."), END_OF_THOUGHT, *LETTERS.encode_text("Sun")]
    assert (ids, end) == (asked + thoughts, None)


def test_a_control_token_in_what_was_begun_stays_text(chat: Chat) -> None:
    ids, _ = going_on(chat, [*ASKED, Message("assistant", evil := "".join(CONTROL))])
    assert LETTERS.spelt(ids).endswith(evil)
    assert all(one < LETTERS.BASE for one in ids[-len(evil) :])


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "must end with an assistant turn"),
        (ASKED, "must end with an assistant turn"),
        ([*ASKED, Message("assistant", "")], "is empty"),
        ([*ASKED, Message("assistant", "a", calls=(ToolCall("a", "f", "{}"),))], "ends in calls"),
        ([Message("assistant", "a")], "must end with a user turn"),
    ],
)
def test_a_turn_that_cannot_go_on_is_refused(chat: Chat, turns: list[Message], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        chat.prompt(turns, Ask(continues=True))


def test_thoughts_are_no_beginning_of_an_answer_without_thinking(tmp_path: Path) -> None:
    turns = [*ASKED, Message("assistant", "a", "Hm.")]
    with pytest.raises(RequestError, match="turn thinking on"):
        open_chat(tmp_path, "deepseek_v32", LETTERS).prompt(turns, Ask(continues=True))


@pytest.mark.parametrize(
    "template", ["plain", "{% for m in messages * 2 %}{{ m.content }}{% endfor %}"]
)
def test_a_template_that_does_not_write_the_turn_as_it_is_says_so(
    tmp_path: Path, template: str
) -> None:
    chat = with_template(tmp_path, template)
    try:
        with pytest.raises(RequestError, match="does not write the last turn"):
            chat.prompt([*ASKED, Message("assistant", "a")], Ask(continues=True))
    finally:
        chat.close()
