# SPDX-License-Identifier: Apache-2.0
"""A rendered prompt in pieces: control tokens apart from text, so that no text becomes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from freewheel.errors import UnsupportedModel

THINK, NO_THINK = "<think>", "</think>"
"""What opens thinking and what ends it, in every family here."""

GOES_ON = "continue_final_message"
"""Among what a template is given, if the prompt is to end where the last turn does so far."""

Piece = tuple[str, bool]
"""(text, whether it is one control token)."""


class Vocabulary(Protocol):
    """What an encoding needs of a tokenizer."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Every token that text must not become, as it is spelt, and its id."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a control token."""
        ...


def ids_of(pieces: Iterable[Piece], vocabulary: Vocabulary) -> list[int]:
    """Token ids of a prompt. Raises UnsupportedModel if the tokenizer lacks a control token."""
    ids: list[int] = []
    for text, control in joined(pieces):
        if not control:
            ids += vocabulary.encode_text(text)
            continue
        found = vocabulary.token_id(text)
        if found is None:
            raise UnsupportedModel(f"chat: the tokenizer has no {text!r} token")
        ids.append(found)
    return ids


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same with neighbouring texts in one: a tokenizer must see them together."""
    held = ""
    for text, control in pieces:
        if not control:
            held += text
            continue
        if held:
            yield held, False
        held = ""
        yield text, True
    if held:
        yield held, False
