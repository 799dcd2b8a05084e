# SPDX-License-Identifier: Apache-2.0
"""What a reader says on a line, and what it takes for an answer: nothing told is believed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from freewheel.spec.handoff import Piece, WireSettings
from freewheel.transfer.keys import Key
from freewheel.transfer.line import Line, WireError, connect
from freewheel.transfer.wire import Pair, Wire

MOST_RANKS = 1024
"""Of one engine; so many ports, from the one on that a request names, are one engine's."""


@dataclass(frozen=True)
class Told:
    """What the other engine has in a room. `ranks`: from where its ranks that have it are to be
    read, as steps from the port that was asked; 0: on this very line."""

    pieces: tuple[Piece, ...]
    card: dict[str, str]
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Asker:
    """A reader: by what it reads, blocks of which layout, and the key that it shows."""

    wire: Wire
    layout: str
    key: Key | None

    def ask(self, line: Line, room: str, first: int) -> Told:
        """The room's blocks from the `first` on. Raises WireError."""
        told = self._told(line, {"room": room, "first": first})
        return Told(_pieces(told), _card(told), _ranks(told))

    def bring(
        self, source: tuple[str, int], room: str, pairs: Sequence[Pair], until: float
    ) -> None:
        """Copy these slots from the rank that listens there, while another line holds the room.

        It says where they are: addresses of the pairs count for nothing. Raises WireError.
        """
        line = connect(*source, until)
        try:
            note = secrets.token_hex(16)
            told = self._told(line, {"room": room, "first": 0, "part": note})
            where = {piece.slot: piece.address for piece in _pieces(told)}
            if any(pair.theirs not in where for pair in pairs):
                raise WireError("a rank of the other engine lacks blocks that its first one named")
            there = [Pair(pair.own, pair.theirs, where[pair.theirs]) for pair in pairs]
            self.wire.read(line, _card(told), there, note)
        finally:
            line.close()

    def _told(self, line: Line, asked: dict[str, Any]) -> dict[str, Any]:
        if self.key is not None:
            self.key.meet(line)
        line.say(asked | {"layout": self.layout, "wire": self.wire.name})
        told = line.hear()
        if "refused" in told:
            raise WireError(f"the other engine: {told['refused']}")
        return told


def ports_of(source: tuple[str, int], told: Told, settings: WireSettings) -> tuple[int, ...]:
    """Where the other engine's ranks are read, in their order. Raises WireError for a port that an
    engine asked at `source` cannot have, unless this one may fetch from there anyway."""
    host, first = source
    ports = tuple(first + step for step in told.ranks)
    for port in ports:
        own = first <= port < min(first + MOST_RANKS, 1 << 16)
        if not own and not (0 < port < 1 << 16 and settings.may_fetch_from(host, port)):
            raise WireError(
                f"its ranks are at port {port}, which is none of the {MOST_RANKS} from {first} on; "
                "allow it with --kv-peer"
            )
    return ports


def _pieces(told: dict[str, Any]) -> tuple[Piece, ...]:
    """Raises WireError for anything else."""
    found = told.get("pieces")
    kinds = {one.name: one.type for one in fields(Piece)}
    types = {"int": int, "bool": bool, "str": str}
    words = [name for name, kind in kinds.items() if kind == "int"]
    if not isinstance(found, list):
        raise WireError("the other engine named no blocks")
    for one in found:
        if not isinstance(one, dict) or one.keys() != kinds.keys():
            raise WireError("the other engine named something that is no block")
        if any(type(one[name]) is not types[str(kind)] for name, kind in kinds.items()):
            raise WireError("the other engine named a block that is none")
        if not all(0 <= one[name] < 1 << 63 for name in words):
            raise WireError("the other engine named a block beyond all memory")
    return tuple(Piece(**one) for one in found)


def _card(told: dict[str, Any]) -> dict[str, str]:
    found = told.get("card")
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise WireError("the other engine did not say where its memory is")
    return found


def _ranks(told: dict[str, Any]) -> tuple[int, ...]:
    found = told.get("ranks")
    if not isinstance(found, list) or not 0 < len(found) <= MOST_RANKS:
        raise WireError("the other engine did not say which of its ranks have the prompt")
    if any(type(one) is not int or abs(one) >= 1 << 16 for one in found):
        raise WireError("the other engine has ranks that are nowhere")
    return tuple(found)
