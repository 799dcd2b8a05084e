# SPDX-License-Identifier: Apache-2.0
"""Conversations as OpenAI writes them, for `LLM.chat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from freewheel.chat import Message, Prompt
from freewheel.engine.output import Output
from freewheel.engine.reader import Reader
from freewheel.engine.tokenizer import Tokenizer
from freewheel.errors import RequestError
from freewheel.spec import FinishReason, SamplingParams

ROLES = ("system", "user", "assistant", "tool")

Turns = Sequence[Mapping[str, Any] | Message]
"""Turns of one conversation: `{"role": "user", "content": "Hello"}`, or messages."""


def conversations(given: Turns | Sequence[Turns]) -> list[Turns]:
    """One or several, as a list. Raises RequestError for what is neither."""
    _check_list(given)
    if isinstance(given[0], Mapping | Message):
        return [given]  # type: ignore[list-item]
    return list(given)  # type: ignore[arg-type]


def messages_of(turns: Turns) -> list[Message]:
    """Raises RequestError, naming the turn, for one that is not of this form."""
    _check_list(turns)
    return [_message(turn, f"turn {place}") for place, turn in enumerate(turns)]


def _check_list(given: object) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise RequestError("messages", "must be a list of turns, or a list of such lists")
    if not given:
        raise RequestError("messages", "a list of turns is empty; give at least one turn")


def _message(turn: Mapping[str, Any] | Message, where: str) -> Message:
    if isinstance(turn, Message):
        return turn
    if not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys():
        raise RequestError("messages", f"{where} needs a role and a content, got {turn!r}")
    if turn["role"] not in ROLES:
        raise RequestError("messages", f"{where} has role {turn['role']!r}; {', '.join(ROLES)} are")
    extra = [name for name in turn if name not in ("role", "content", "reasoning_content")]
    if extra:
        raise RequestError(
            "messages", f"{where} has {extra[0]!r}; for calls of tools give freewheel.chat.Message"
        )
    content, thoughts = turn["content"], turn.get("reasoning_content")
    if not isinstance(content, str) or not isinstance(thoughts, str | None):
        raise RequestError("messages", f"{where}: content must be text")
    return Message(turn["role"], content, thoughts)


def parted(
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    output: Output,
    prompt: Prompt,
    params: SamplingParams,
) -> Output:
    """`output`, of a model that may have thought first: its thoughts apart from its text."""
    if prompt.end_of_thought is None:
        return output
    reader = Reader(tokenizer, params, prompt.end_of_thought, prompt.start_of_thought)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    by_token = (
        output.finish_reason is FinishReason.STOP
        and output.token_ids[-1:] != ()
        and (output.token_ids[-1] in stops)
    )
    finish = FinishReason.STOP if by_token else FinishReason.LENGTH
    reading = reader.push(output.token_ids, 0, finish)
    thought = "".join(piece.text for piece in reading.thought)
    said = "".join(piece.text for piece in reading.said)
    return replace(output, text=said, reasoning=thought or None)
