# SPDX-License-Identifier: Apache-2.0
"""An answer as it comes: thoughts, stretches of text, and calls of tools."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from freewheel.chat import CallBegun, CallDelta, Content, Event, Parser, values_of
from freewheel.engine import Logprobs, Reader, Reading
from freewheel.server.tickets import Ticket
from freewheel.spec import FinishReason


def _key() -> str:
    return secrets.token_hex(12)


@dataclass(eq=False)
class Said:
    """A stretch of text so far. `key`: what makes its id unlike any other's."""

    key: str = field(default_factory=_key)
    parts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(eq=False)
class Call:
    """A call of a tool so far."""

    name: str
    key: str = field(default_factory=_key)
    parts: list[str] = field(default_factory=list[str])
    whole: bool = False

    @property
    def arguments(self) -> str:
        """JSON text of an object, its beginning if the call is not whole."""
        return "".join(self.parts)

    @property
    def values(self) -> dict[str, Any]:
        """The arguments that are whole."""
        return values_of(self.arguments)


@dataclass(eq=False)
class Choice:
    """One answer so far."""

    index: int
    prompt: list[int]
    ticket: Ticket
    reader: Reader
    parser: Parser | None = None
    blocks: list[Said | Call] = field(default_factory=list["Said | Call"])
    """Text and calls, in the order in which they came."""
    calls: list[Call] = field(default_factory=list[Call])
    thought: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    picks: tuple[tuple[int, ...], ...] | None = None
    """What the prompt's last token picked in each layer that picks, if asked for."""
    accepted: int = 0
    finish: FinishReason | None = None
    stopped_by: str | None = None
    """The stop string that ended it."""

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.blocks if isinstance(one, Said))

    @property
    def thoughts(self) -> str:
        return "".join(self.thought)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, in OpenAI's words: whole calls count before the end they brought."""
        if self.finish is FinishReason.STOP and any(call.whole for call in self.calls):
            return "tool_calls"
        return self.finish

    def add(self, reading: Reading) -> Told:
        """What a reading brings, its markup read."""
        told, before = self._told(reading), len(self.blocks)
        for event in told.events:
            if isinstance(event, Content):
                self._say(event.text)
            elif isinstance(event, CallBegun):
                self.calls.append(Call(event.name))
                self.blocks.append(self.calls[-1])
            elif isinstance(event, CallDelta):
                self.calls[event.index].parts.append(event.text)
            else:
                self.calls[event.index].whole = True
        self.thought += [piece.text for piece in reading.thought]
        self.token_ids += reading.token_ids
        self.accepted += reading.accepted
        self.finish = reading.finish
        self.stopped_by = reading.stopped_by
        if self.parser is not None and self.parser.full:
            self.finish = self.finish or FinishReason.STOP
        return replace(told, begun=len(self.blocks) - before)

    def _say(self, text: str) -> None:
        last = self.blocks[-1] if self.blocks else None
        if not isinstance(last, Said):
            last = Said()
            self.blocks.append(last)
        last.parts.append(text)

    def _told(self, reading: Reading) -> Told:
        """Text held back as possible markup comes with the piece that shows that it is none."""
        told = Told()
        for piece in reading.said:
            events = [Content(piece.text)] if self.parser is None else self.parser.push(piece.text)
            told.add(events, piece.accepted, piece.place)
        if reading.finish is not None and self.parser is not None:
            last = len(self.token_ids) + len(reading.token_ids) - 1
            told.add(self.parser.finish(), False, last)
        return told


SaidPiece = tuple[str, bool, int]
"""A text, whether it was an accepted draft, and the place of its token in the answer."""


@dataclass(frozen=True)
class Told:
    """What a reading says once markup is told from text.

    `pieces`: the text, whether it was a draft, and the place of its token in the answer. `begun`:
    blocks that begin with it.
    """

    begun: int = 0
    events: list[Event] = field(default_factory=list[Event])
    pieces: list[SaidPiece] = field(default_factory=list["SaidPiece"])

    def add(self, events: Sequence[Event], accepted: bool, place: int) -> None:
        said = [one.text for one in events if isinstance(one, Content)]
        self.events.extend(events)
        self.pieces.extend((text, accepted, place) for text in said)


@dataclass(frozen=True)
class Part:
    """What one round added to one choice."""

    choice: Choice
    reading: Reading
    told: Told
    logprobs: tuple[Logprobs, ...] = ()

    @property
    def said(self) -> str:
        return "".join(text for text, _, _ in self.told.pieces)

    @property
    def thought(self) -> str:
        return "".join(piece.text for piece in self.reading.thought)

    @property
    def said_pieces(self) -> list[SaidPiece]:
        """The answer's text with its origin."""
        return self.told.pieces

    @property
    def thought_pieces(self) -> list[SaidPiece]:
        """The same of the thoughts."""
        return [(piece.text, piece.accepted, piece.place) for piece in self.reading.thought]
