# SPDX-License-Identifier: Apache-2.0
"""Decoding rounds in which nobody is weighed against anybody, without a plan or a letter for each.

Most rounds of a trace take rows on that decode already, on pages that they have. For these this
does to tenancies what `Scheduler.plan` and `collect` would do, in place. Whatever needs a choice is
the engine's own: who is admitted, what is dropped for pages, who is preempted, what is published.
`Replay` with and without it gives the same figures to the last bit, and a test says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from freewheel.host import Arrived, Request, Scheduler, Update
from freewheel.host.seats import Seat
from freewheel.host.tenancy import Tenancy
from freewheel.simulate.device import Gain, Row, StubDevice
from freewheel.spec import FinishReason, StepPlan, StepResult, StepShape


@dataclass(slots=True, eq=False)
class Lane:
    """A row that decodes.

    `known`: as of the letters read; the request itself has been told of the first `told`. `room`:
    tokens that its pages hold. `due`: when so many are computed, something is to be published or
    freed. `rounds`, `drafted`, `agreed`: counted, and the request not told.
    """

    request: Request
    tenancy: Tenancy
    row: Row
    known: int
    told: int
    limit: int
    room: int = 0
    due: int = 0
    rounds: int = 0
    drafted: int = 0
    agreed: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Stride(StepPlan):
    """A decoding round, run already, whose letter is not read yet: what each lane's row gained, and
    the seconds that it took. The plan itself says nothing."""

    lanes: list[Lane]
    gained: list[Gain]
    seconds: float


FEW = 16
"""Rows among which it is common that for some rounds nothing happens to any of them."""

_rank = attrgetter("request.rank")


class LeanScheduler(Scheduler):
    """A Scheduler whose plans may be `Stride`s: their letters are for `read`, not for `collect`.

    For requests that nothing has to follow: without grammars, scores or host memory.
    """

    changed = True
    """Some page may have changed hands since the caller last set this to False."""

    def open(self, device: StubDevice) -> None:
        """`device` runs the rounds. To be called first."""
        self._device = device
        self._lanes: list[Lane] | None = None
        self._by_row: dict[int, Lane] = {}
        self._prefilling = False
        self._read = self._heard = -1  # the round whose letter was read last, and as pools know
        self._since = 0  # rounds from this one on have not changed anybody's turn yet

    def round(self, prompts: bool) -> StepPlan | None:
        stride = None if prompts else self._stride()
        if stride is not None:
            return stride
        plan = super().round(prompts)
        if plan is not None:
            self._lanes, self._since = None, self._next_round
        return plan

    def seats(self, prompts: bool) -> list[Seat]:
        if prompts and not self._prompts:
            return []
        self._catch_up()
        rows = len(self.roster.running)
        seats = super().seats(prompts)
        self.changed = True
        if len(self.roster.running) != rows:
            self._lanes = None
        return seats

    def _stride(self) -> Stride | None:
        """A decoding round; None if a row would have to wait, or to be preempted, for pages."""
        lanes = self._ready()
        if not lanes or len(lanes) > self.ladder.max_batch:
            return None
        reach = self.roster.footprint.decode.reach
        for lane in lanes:
            tenancy = lane.tenancy
            if tenancy.lower + tenancy.pending + reach > lane.room and not self._extended(lane):
                return None
        shape = self.ladder.fit_decode(len(lanes))
        return self._under_way(
            lanes, shape, *self._device.decode([one.row for one in lanes], shape)
        )

    def read(self, stride: Stride) -> list[Request]:
        """Its letter, which is due; requests that have ended."""
        ended: list[Request] = []
        self._rounds.popleft()
        width = stride.shape.width
        for lane, (gained, drafted, agreed) in zip(stride.lanes, stride.gained, strict=True):
            tenancy = lane.tenancy
            if not tenancy.open:
                lane.request.stats.dropped += gained
                continue
            tenancy.lower += gained
            tenancy.pending -= width
            tenancy.owed -= 1
            lane.known += gained
            lane.rounds += 1
            lane.drafted += drafted
            lane.agreed += agreed
            if lane.known >= lane.limit:
                self._finished(lane)
                ended.append(lane.request)
            elif tenancy.lower >= lane.due:
                self._settled(lane)
        self._read = stride.round_id
        return ended

    def steady(self, flying: Sequence[StepResult | Stride]) -> list[Lane]:
        """Rows that decode, if they alone do in the rounds under way, `flying`, and in the next."""
        if self._lanes is not None and len(self._lanes) > FEW:
            return []
        lanes = self._ready()
        if len(lanes) > FEW or len(flying) != self.run_ahead or not self._nobody_comes:
            return []
        if any(not isinstance(one, Stride) or one.lanes != lanes for one in flying):
            return []
        return lanes

    def bounds(self, lanes: Sequence[Lane]) -> tuple[list[int], list[int]]:
        """Of each such row, up to how many computed tokens the next round needs nothing, and how
        many it may not reach, with nobody to be told, by a letter's being read.
        """
        decode, rounds = self.roster.footprint.decode, self.run_ahead
        ahead = rounds * decode.width + decode.reach
        return (
            [min(lane.room - ahead, lane.limit - 2 - rounds) for lane in lanes],
            [min(lane.due, lane.limit - 1) for lane in lanes],
        )

    def passed(
        self, lanes: list[Lane], rounds: Sequence[tuple[list[Gain], float]], read: int
    ) -> list[Stride]:
        """So many such rounds were launched; those of which the letters were not read.

        `rounds`: what each row gained, and the seconds. Letters of rounds that were under way
        before are for `read`, beforehand.
        """
        shape, first = self.ladder.fit_decode(len(lanes)), self._next_round
        for at, lane in enumerate(lanes):
            gains = [gained[at] for gained, _ in rounds[:read]]
            more = sum([gained for gained, _, _ in gains])
            lane.tenancy.lower += more
            lane.known += more
            lane.rounds += read
            lane.drafted += sum([drafted for _, drafted, _ in gains])
            lane.agreed += sum([agreed for _, _, agreed in gains])
        self._next_round += read
        self._read = max(self._read, first + read - 1) if read else self._read
        for _ in range(read):
            self._kinds.ran(prompts=False)
        return [self._under_way(lanes, shape, *round) for round in rounds[read:]]

    def add(self, request: Request) -> None:
        if self.roster.waiting.tenants.has(request.tenant):
            self._take_turns()
        else:
            self._catch_up()  # what others were served counts
        super().add(request)

    def collect(
        self, result: StepResult, now: float | None = None, at: Arrived | None = None
    ) -> list[Update]:
        lanes = [self._by_row[row.row] for row in result.rows if row.row in self._by_row]
        for lane in lanes:
            self._tell(lane)
        self._hear()
        updates = super().collect(result, now, at)
        self._read, self.changed = result.round_id, True
        for lane in lanes:
            lane.known = lane.told = lane.request.known
        return updates

    @property
    def _nobody_comes(self) -> bool:
        """Whoever waits, no letter will give them a row."""
        if self._prefilling or not self.roster.waiting:
            return not self._prefilling
        self._hear()
        rows = self.roster.reservations.rows
        return not rows.free and not rows.due

    @property
    def _prompts(self) -> bool:
        """Somebody is on the way through a prompt, or waits and may get a row."""
        if self._lanes is None:
            self._lanes = self._new_lanes()
        if self._prefilling or not self.roster.waiting:
            return self._prefilling
        self._hear()
        return self.roster.reservations.rows.free > 0

    def _ready(self) -> list[Lane]:
        """Rows that decode, in the order in which they are served."""
        if self._lanes is None:
            self._lanes = self._new_lanes()
        lanes = self._lanes
        for lane in lanes:
            if lane.known + lane.tenancy.owed >= lane.limit or not lane.tenancy.open:
                lanes = self._lanes = [
                    one
                    for one in lanes
                    if one.tenancy.open and one.known + one.tenancy.owed < one.limit
                ]
                break
        return lanes

    def _new_lanes(self) -> list[Lane]:
        self._prefilling = False
        before, self._by_row = self._by_row, {}
        for request in self.roster.running:
            tenancy = self.roster.tenancy(request)
            if tenancy.prefilling:
                self._prefilling = True
                continue
            lane = before.get(tenancy.row)
            if lane is None or lane.tenancy is not tenancy:
                row = self._device.row(tenancy.row)
                known = request.known
                lane = Lane(request, tenancy, row, known, known, request.limit)
            self._by_row[tenancy.row] = lane
        return sorted(self._by_row.values(), key=_rank)

    def _extended(self, lane: Lane) -> bool:
        """It has pages for its next round; they are what `plan` would take, if anything."""
        self._hear()
        footprint, reserved = self.roster.footprint, self.roster.reservations
        tenancy = lane.tenancy
        writes = reserved.reserve(tenancy, footprint.decode_tokens(tenancy.upper))
        self.changed = self.changed or writes != ()
        if writes is None:
            return False
        spans = zip(footprint.groups, tenancy.spans, strict=True)
        lane.room = min(span.end * group.page_size for group, span in spans)
        return True

    def _under_way(
        self, lanes: list[Lane], shape: StepShape, gained: list[Gain], seconds: float
    ) -> Stride:
        number, width, depth = self._next_round, shape.width, shape.depth
        for lane in lanes:
            tenancy = lane.tenancy
            tenancy.last_round, tenancy.drafts = number, depth
            tenancy.pending += width
            tenancy.owed += 1
        self._kinds.ran(prompts=False)
        self._next_round += 1
        stride = Stride(number, shape, (), (), (), (), lanes=lanes, gained=gained, seconds=seconds)
        self._rounds.append((stride, []))
        return stride

    def _settled(self, lane: Lane) -> None:
        self._tell(lane)
        self._hear()
        reserved, tenancy = self.roster.reservations, lane.tenancy
        reserved.publish(lane.request, tenancy, None)
        reserved.trim(tenancy)
        lane.due = self._next_due(tenancy)
        self.changed = True

    def _finished(self, lane: Lane) -> None:
        self._tell(lane)
        self._hear()
        self.roster.reservations.publish(lane.request, lane.tenancy, FinishReason.LENGTH)
        self._end(lane.request, FinishReason.LENGTH)
        self.changed = True

    def _next_due(self, tenancy: Tenancy) -> int:
        """Computed tokens at which a block is whole, or pages lie behind what is read."""
        reserved = self.roster.reservations
        due = [
            pool.group.retention + (span.first + 1) * pool.group.page_size
            for pool, span in zip(reserved.pools, tenancy.spans, strict=True)
            if pool.group.retention is not None
        ]
        if reserved.prefix is not None:
            due.append((tenancy.published + 1) * reserved.prefix.block_size)
        return min(due, default=1 << 62)

    def _catch_up(self) -> None:
        """All is as if every round had been planned and every letter collected."""
        for lane in self._by_row.values():
            self._tell(lane)
        self._take_turns()
        self._hear()

    def _take_turns(self) -> None:
        """As in `launch`, round by round, but for rounds that later ones of the same row hide."""
        if self._since == self._next_round:
            return
        lanes = [lane for lane in self._by_row.values() if lane.tenancy.last_round >= self._since]
        for lane in sorted(lanes, key=lambda one: (one.tenancy.last_round, one.request.turn)):
            lane.request.turn = next(self._turns)
        self._since = self._next_round

    def _tell(self, lane: Lane) -> None:
        """The request knows what came."""
        if not lane.rounds or not lane.tenancy.open:
            return
        request, stats = lane.request, lane.request.stats
        request.output.extend(self._device.answer(lane.row, lane.told, lane.known))
        self.roster.waiting.tenants.charge(request.tenant, lane.known - lane.told)
        lane.told = lane.known
        stats.decode_rounds += lane.rounds
        stats.drafted += lane.drafted
        stats.agreed += lane.agreed
        lane.rounds = lane.drafted = lane.agreed = 0

    def _hear(self) -> None:
        """Pools know which letters were read."""
        if self._heard < self._read:
            self.roster.reservations.collected(self._read)
            self._heard = self._read
