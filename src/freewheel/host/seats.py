# SPDX-License-Identifier: Apache-2.0
"""The rows of the next round: the two kinds of round, and who takes part."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from freewheel.host.chunks import leading, sharing
from freewheel.host.request import Request
from freewheel.host.roster import Roster
from freewheel.host.tenancy import Tenancy
from freewheel.spec import (
    Admission,
    Feed,
    MaskWrite,
    PageWrite,
    ShapeLadder,
    StepPlan,
    StepShape,
    TableWrite,
)


@dataclass(slots=True, eq=False)
class Seat:
    """One row of a round. Not frozen, and no copy is made: this is made for every row and round.

    `advance`: the most tokens by which `computed` grows. `emits`: at least one token is chosen
    for certain.
    `start`: the first prompt position that the round computes; None in a decoding round.
    `offered`: drafts that were asked for and that the round may verify. `extras`: what the round
    must do for the row besides choosing.
    """

    request: Request
    tenancy: Tenancy
    writes: tuple[PageWrite, ...]
    advance: int
    emits: bool
    start: int | None = None
    offered: int = 0
    extras: int = 0

    @property
    def mask(self) -> MaskWrite | None:
        """What the host's grammar allows next, if the round decides a token of such a row."""
        return self.request.mask() if self.ends_prompt else None

    @property
    def ends_prompt(self) -> bool:
        """All certain tokens are computed behind the round: it may decide more."""
        return self.start is None or self.start + self.advance == self.tenancy.known

    @property
    def admission(self) -> Admission | None:
        """What the row starts from, if this is the tenancy's first round."""
        return self.request.admission() if self.tenancy.last_round < 0 else None

    def feed(self, width: int) -> Feed | None:
        """The chunk, and the token behind it, which the drafter reads at the chunk's end.

        A row's first feed begins at its first token: who reads a row's tokens finds those too
        whose pages were there already.
        """
        if self.start is None:
            return None
        start = self.start if self.tenancy.last_round >= 0 else 0
        stop = min(self.start + width + 1, self.tenancy.known)
        return Feed(start, self.request.tokens(start, stop))


def prompt_seats(roster: Roster, ladder: ShapeLadder) -> list[Seat]:
    """Rows on their way through a prompt, and new ones: by priority, then served longest ago.

    `chunks.sharing` says how many. Pages are reserved to the end of each row's chunk, for the best
    rank first: a preemption takes the worst, so never a row that has its seat.
    """
    started = [r for r in roster.running if r.tenancy is not None and r.tenancy.prefilling]
    if not started and not roster.waiting:
        return []
    started.sort(key=_urgency)
    joining = islice(roster.admissible(), ladder.max_prefill_batch)
    queue = list(heapq.merge(started, joining, key=_urgency))
    chosen = _chosen(roster, ladder, queue)
    waiting = [request for request in chosen if request.tenancy is None]
    tenants = len(roster.running)
    seats: list[Seat | None] = []
    for request in sorted(chosen, key=lambda r: r.rank):
        if request in waiting:
            # A preemption just now puts the victim into the queue, and its turn comes first.
            if len(roster.running) < tenants:
                continue
            roster.admit(request)
            tenants += 1
        seats.append(_prompt_seat(roster, ladder, request))
    found = [seat for seat in seats if seat is not None]
    roster.served([seat.request for seat in found], started)
    return found


def _chosen(roster: Roster, ladder: ShapeLadder, queue: list[Request]) -> list[Request]:
    """Those whose chunks share a rectangle. A request that shows picks has one to itself."""
    if queue and queue[0].shows:
        return queue[:1]
    plain = [request for request in queue if not request.shows]
    return plain[: sharing(ladder, [_chunk(roster, ladder, request) for request in plain])]


def _urgency(request: Request) -> tuple[bool, int, int]:
    """In the order of which prompts are computed."""
    return (not request.overdue, 0 if request.overdue else request.priority, request.turn)


class DecodeSeats:
    """Seats of rows that decode: rounds share them, but for those of rows that came or moved up."""

    def __init__(self, roster: Roster, max_batch: int, shared: bool) -> None:
        """`shared`: False where rounds are of different depths, of which their seats tell."""
        self._roster, self._max_batch, self._shared = roster, max_batch, shared
        self._latest: list[Seat] = []

    def take(self) -> list[Seat]:
        """Rows that decode; those launched longest ago, if they exceed the ladder's batch.

        Leaves out requests that rounds in flight will finish for certain, and those that wait for a
        mask.
        """
        ready = [r for r in self._roster.ranked if r.decodes and (r.guide is None or not r.held)]
        if len(ready) > self._max_batch:
            longest = sorted(ready, key=attrgetter("turn"))[: self._max_batch]
            ready = sorted(longest, key=attrgetter("rank"))
        footprint, before = self._roster.footprint, self._latest if self._shared else []
        seats: list[Seat] = []
        for request in ready:
            tenancy = request.tenancy
            if tenancy is None:
                continue  # for want of pages, just now
            writes: tuple[PageWrite, ...] | None = ()
            if tenancy.upper + footprint.decode.reach > tenancy.room:
                tokens = footprint.decode_tokens(tenancy.upper)
                writes = self._roster.secure(request, tokens)
                if writes is None:
                    continue
            at = len(seats)
            if at < len(before) and before[at].tenancy is tenancy:
                before[at].writes = writes
                seats.append(before[at])
            else:
                seats.append(_decode_seat(footprint.decode, request, tenancy, writes))
        self._latest = seats
        return seats


def prompt_shape(seats: list[Seat], ladder: ShapeLadder, batch: int) -> StepShape:
    """The smallest prompt rectangle for these rows, of which a copy of the model has `batch`."""
    ready = any(seat.ends_prompt for seat in seats)
    if ready and seats[0].request.shows:
        return ladder.showing
    longest = max(seat.advance for seat in seats)
    extras, guided = extras_of(seats), guided_of(seats)
    return ladder.fit_prefill(batch, longest, ready, extras, guided)


def within(seats: list[Seat], shape: StepShape) -> list[Seat]:
    """Seats of decoding rows in a round of `shape`."""
    width = shape.width
    for seat in seats:
        drafts = seat.tenancy.drafts
        seat.advance, seat.offered = width, drafts if drafts < width else width - 1
    return seats


def extras_of(seats: list[Seat]) -> int:
    """What the round must do for these rows besides choosing."""
    return max([seat.extras for seat in seats])


def guided_of(seats: list[Seat]) -> bool:
    """Whether the host follows the grammar of one of these rows."""
    return not all(seat.request.guide is None for seat in seats)


def step_plan(
    round_id: int, shape: StepShape, seats: list[Seat], table: TableWrite | None = None
) -> StepPlan:
    """The letter for the device."""
    rows = tuple([seat.tenancy.row for seat in seats])
    masks = tuple([seat.mask for seat in seats]) if shape.guided else ()
    if not shape.for_prompts:
        writes = [write for seat in seats if seat.writes for write in seat.writes]
        nothing = (None,) * len(seats)
        return StepPlan(round_id, shape, rows, nothing, nothing, tuple(writes), table, masks)
    return StepPlan(
        round_id=round_id,
        shape=shape,
        rows=rows,
        admissions=tuple(seat.admission for seat in seats),
        feeds=tuple(seat.feed(shape.width) for seat in seats),
        page_writes=tuple(write for seat in seats for write in seat.writes),
        table=table,
        copies=tuple(c for s in seats if s.tenancy.last_round < 0 for c in s.tenancy.copies),
        masks=masks,
    )


def _chunk(roster: Roster, ladder: ShapeLadder, request: Request) -> int:
    """Tokens of the request's next prompt chunk; of a waiting one, as if nothing were kept."""
    left, most = request.known - request.upper, roster.footprint.chunk
    return leading(ladder, left, most) if request.shows else min(left, most)


def _prompt_seat(roster: Roster, ladder: ShapeLadder, request: Request) -> Seat | None:
    # One of better rank may have preempted this one since it was chosen.
    if request.tenancy is None:
        return None
    tenancy = request.tenancy
    start, given = tenancy.upper, _chunk(roster, ladder, request)
    tokens = roster.footprint.chunk_tokens(start, given, tenancy.known)
    writes = roster.secure(request, tokens)
    if writes is None:
        return None
    if tenancy.last_round < 0:
        writes = roster.reservations.columns(tenancy)
    emits = start + given == tenancy.known and request.guide is None
    extras = request.extras(prompt=True)
    return Seat(request, tenancy, writes, given, emits, start, extras=extras)


def _decode_seat(
    deepest: StepShape, request: Request, tenancy: Tenancy, writes: tuple[PageWrite, ...]
) -> Seat:
    emits = request.guide is None  # a guided row may be held
    extras = request.extras(prompt=False)
    return Seat(request, tenancy, writes, deepest.width, emits, extras=extras)
