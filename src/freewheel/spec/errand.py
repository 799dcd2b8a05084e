# SPDX-License-Identifier: Apache-2.0
"""What rank 0 has other ranks do of prompts that change engines, as plain data and as text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from freewheel.spec.handoff import WireSettings


@dataclass(frozen=True)
class Opening:
    """Be ready: as an engine of `role`, of blocks of this layout. Ranks that listen do so at the
    port of `wire` and as many behind it as their number; at a free one each if it is 0."""

    role: str
    layout: str
    wire: WireSettings


@dataclass(frozen=True)
class Offer:
    """Whoever names `room` may have these slots of copy `replica`, until its `Withdrawal`."""

    replica: int
    room: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Withdrawal:
    """Nobody may have them any longer."""

    replica: int
    room: str


@dataclass(frozen=True)
class Trip:
    """Slot `own` becomes what the other engine has in its slot `theirs`. `shift`: by how much the
    block's label here differs from that there."""

    own: int
    theirs: int
    shift: int


@dataclass(frozen=True)
class Bring:
    """Ranks of copy `replica` bring these slots of `room`, each from one of the other engine's
    ranks, which listen at `ports` of `host`; each says what came of it. `number`: this errand's.
    `seconds`: how long it may take."""

    number: int
    replica: int
    room: str
    host: str
    ports: tuple[int, ...]
    trips: tuple[Trip, ...]
    seconds: float


@dataclass(frozen=True)
class Oblivion:
    """What was offered or is being brought is of no use any more: rank 0 knows nothing of it."""


Errand = Opening | Offer | Withdrawal | Bring | Oblivion

_KINDS = {kind.__name__: kind for kind in (Opening, Offer, Withdrawal, Bring, Oblivion)}


def text_of(errand: Errand) -> str:
    """What `errand_in` reads: JSON."""
    own = asdict(errand)
    if isinstance(errand, Bring):
        own["trips"] = [(trip.own, trip.theirs, trip.shift) for trip in errand.trips]
    return json.dumps({"kind": type(errand).__name__} | own)


def errand_in(text: str) -> Errand:
    """What `text_of` wrote."""
    found: dict[str, Any] = json.loads(text)
    kind = _KINDS[found.pop("kind")]
    if kind is Opening:
        wire = {one.name: _whole(found["wire"][one.name]) for one in fields(WireSettings)}
        return Opening(found["role"], found["layout"], WireSettings(**wire))
    if kind is Bring:
        found["trips"] = [Trip(*trip) for trip in found["trips"]]
    return kind(**{name: _whole(value) for name, value in found.items()})


def _whole(value: Any) -> Any:
    """JSON has lists alone."""
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
