# SPDX-License-Identifier: Apache-2.0
"""Chat messages to prompt tokens, built in for the families that ship no template.

DeepSeek-V3.2 publishes an encoding instead of a template (the model card's `encoding` folder):
`<begin>{system}<User>{question}<Assistant></think>{answer}<end>...`, where the mark behind
`<Assistant>` opens thinking (`<think>`) or closes it (`</think>`). Content is encoded as plain
text: a control token spelt by a user never becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from freewheel.errors import RequestError, UnsupportedModel

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK, NO_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str


def encode_chat(
    family: str,
    messages: Sequence[Message],
    encode_text: Callable[[str], list[int]],
    token_id: Callable[[str], int | None],
    thinking: bool = False,
) -> list[int]:
    """Prompt ids that ask for the next assistant turn.

    Raises UnsupportedModel for a family without a built-in encoding or a tokenizer without its
    control tokens, RequestError if the turns do not alternate or do not end with the user's.
    """
    if family != "deepseek_v32":
        raise UnsupportedModel(
            f"chat: no encoding is built in for {family!r}; render the prompt and use `generate`"
        )
    _check_turns(messages)
    marks = {
        mark: _mark_id(mark, token_id) for mark in (BEGIN, END, USER, ASSISTANT, THINK, NO_THINK)
    }
    ids = [marks[BEGIN]]
    for message in messages:
        if message.role == "system":
            ids += encode_text(message.content)
        elif message.role == "user":
            ids += [marks[USER], *encode_text(message.content), marks[ASSISTANT]]
        else:
            ids += [marks[NO_THINK], *encode_text(message.content), marks[END]]
    return [*ids, marks[THINK] if thinking else marks[NO_THINK]]


def _check_turns(messages: Sequence[Message]) -> None:
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    for index, role in enumerate(turns):
        if role != ("user", "assistant")[index % 2]:
            raise RequestError(
                "messages", f"turn {index + 1} is {role!r}: user and assistant must alternate"
            )
    if len(turns) % 2 == 0:
        raise RequestError("messages", "must end with a user turn")


def _mark_id(mark: str, token_id: Callable[[str], int | None]) -> int:
    found = token_id(mark)
    if found is None:
        raise UnsupportedModel(f"chat: the tokenizer has no {mark!r} token")
    return found
