# SPDX-License-Identifier: Apache-2.0
"""Prompts whose last turn, the model's own, is not asked for but goes on where it broke off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from freewheel.chat.pieces import NO_THINK, Piece
from freewheel.chat.turns import Ask, Message, open_turn
from freewheel.errors import RequestError

Render = Callable[[Sequence[Message], Ask], list[Piece]]
"""Pieces of the prompt for the next turn."""


def continuing(render: Render) -> Render:
    """`render`, which opens the next turn by thinking or ends thinking, for turns that go on too.

    What the turn has so far stands behind that opening: thoughts, and their end if text follows.
    """

    def rendered(messages: Sequence[Message], ask: Ask) -> list[Piece]:
        if not ask.continues:
            return render(messages, ask)
        last = open_turn(messages)
        return [*render(messages[:-1], ask), *_so_far(last, ask.thinking)]

    return rendered


def _so_far(turn: Message, thinking: bool) -> list[Piece]:
    if not thinking:
        if turn.reasoning:
            raise RequestError(
                "messages", "the last turn, which is to go on, has thoughts; turn thinking on"
            )
        return [(turn.content, False)]
    thoughts: list[Piece] = [(turn.reasoning or "", False)]
    return [*thoughts, (NO_THINK, True), (turn.content, False)] if turn.content else thoughts
