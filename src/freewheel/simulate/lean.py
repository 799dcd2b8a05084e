# SPDX-License-Identifier: Apache-2.0
"""Decoding rounds in which nobody is weighed against anybody, without a plan or a letter for each.

Most rounds of a trace take rows on that decode already, on pages that they have. What such a round
brings each row is known beforehand (`Luck`), so nothing of it is looked at before something is to
be decided: pages are wanted, a block is whole, a row ends, a request comes. Then tenancies are told
what `Scheduler.plan` and `collect` would have told them round by round, and the engine's own code
decides: who is admitted, what is dropped for pages, who is preempted, what is published. `Replay`
with and without it gives the same figures to the last bit, and a test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from freewheel.host import Arrived, Request, Scheduler, Update
from freewheel.host.seats import Seat
from freewheel.host.tenancy import NOT_KNOWN, Tenancy
from freewheel.simulate.device import StubDevice
from freewheel.simulate.lanes import NEVER, Lane
from freewheel.simulate.watch import Watch
from freewheel.spec import FinishReason, StepPlan, StepResult, StepShape


@dataclass(frozen=True, eq=False, init=False)
class Stride(StepPlan):
    """A decoding round that nobody planned, whose letter is not read yet, and the seconds that it
    took. The plan itself says nothing."""

    seconds: float

    def __init__(self, round_id: int, shape: StepShape, seconds: float) -> None:
        vars(self).update(round_id=round_id, shape=shape, seconds=seconds)


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
        self._lanes: list[Lane] | None = None  # those that go on; None: to be found anew
        self._open: list[Lane] = []  # those of which letters may be unread besides
        self._shapes: dict[int, StepShape] = {}
        self._watch = Watch()
        self._prefilling = False
        self._launched = self._read = 0  # strides, and letters of them
        self._latest = -1  # the round of the stride that was launched last
        self._letter = self._heard = -1  # the round whose letter was read last, and as pools know
        self._since = 0  # rounds from this one on have not changed anybody's turn yet

    def round(self, prompts: bool) -> StepPlan | None:
        if not prompts and self._go_on():
            return self._under_way(self.seconds(1))[0]
        plan = super().round(prompts)
        if plan is not None:
            for lane in self._open if not prompts else ():
                if lane.end == NEVER:
                    lane.stop(self._launched)
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
            self._find_lanes()
        return seats

    def ahead(self) -> tuple[int, int]:
        """How many rounds can be launched and letters be read, in turns, before anybody stops or
        ends, if nobody arrives; all in flight are strides, as many as may be. (0, 0): none.
        """
        if not self._nobody_comes or not self._go_on():
            return 0, 0
        ends = [one.ends for one in self._open if one.ends <= one.end and one.tenancy.open]
        letters = min(ends, default=NEVER) - self._read - 1
        rounds = max(1, min([lane.stays for lane in self._lanes or []]) - self._read + 1)
        return min(rounds, letters + 1), letters

    def seconds(self, count: int) -> list[float]:
        """What each of the next rounds of those who go on takes."""
        lanes = self._lanes or []
        columns = [lane.lengths(self._launched, count) for lane in lanes]
        behind = sum([lane.base for lane in lanes]) - len(lanes)
        sums = columns[0] if len(lanes) == 1 else map(sum, zip(*columns, strict=True))
        return self._device.cost.of_rounds(self._shape, [behind + tokens for tokens in sums])

    def pass_by(self, rounds: int, letters: int, changed: Callable[[int], None]) -> tuple[int, int]:
        """Of so many rounds and letters, in turns, how many come before a row lacks pages; what
        they mean to pages until then has happened.

        `changed` is called before a letter is read if pages have changed hands since the one
        before, with the number of letters that were read until then.
        """
        read, launched, latest, letter = self._read, self._launched, self._latest, self._letter
        first, coming = self._next_round, self._next_round - len(self._rounds)
        at, launching, watch = 0, 0, self._watch
        while True:
            check, due = watch.next_check - read + 1, watch.next_due - read
            check = max(check, launching + 1, at)  # the first round's pages are there
            look = check < due
            now = check if look else due
            if now >= rounds if look else now > letters:
                break
            if self.changed and now > at:
                changed(at)
            at = now
            self._read, self._launched = read + at, launched + at
            if at:
                self._latest, self._letter = first + at - 1, coming + at - 1
            if not look:
                self._settle_due()
                continue
            launching = at
            if not self._checked():
                rounds = letters = at
                break
        if self.changed and letters > at:
            changed(at)
        self._read, self._launched = read, launched
        self._latest, self._letter = latest, letter
        return rounds, letters

    def passed(self, seconds: list[float], read: int) -> list[Stride]:
        """Such rounds were launched, and so many letters read; strides of which they were not."""
        flying = len(self._rounds)
        first, begun = self._next_round, min(read, flying)
        for _ in range(begun):
            self._letter = self._rounds.popleft()[0].round_id
        if read > flying:
            self._letter = first + read - flying - 1
        skipped = read - begun
        self._read += read
        self._next_round += skipped
        self._count_rounds(skipped)
        return self._under_way(seconds[skipped:])

    def read(self, stride: Stride) -> list[Request]:
        """Its letter, which is due; requests that have ended."""
        self._rounds.popleft()
        self._read += 1
        ended = self._settle_due()
        self._letter = stride.round_id
        return ended

    def _settle_due(self) -> list[Request]:
        """Those to whom the letter read last means something; requests that have ended."""
        ended: list[Request] = []
        for lane in sorted(self._watch.dues(self._read), key=_rank):
            if not lane.tenancy.open:
                continue
            for one in self._open if lane.end != NEVER else (lane,):
                if one.tenancy is lane.tenancy:  # its later rounds are to be waited for
                    self._tell(one)
            self._hear()
            self.changed = True
            if lane.request.known >= lane.limit:
                self._finished(lane)
                ended.append(lane.request)
            else:
                self.roster.reservations.settled(lane.request, lane.tenancy)
                self._look_again(lane)
        return ended

    def add(self, request: Request) -> None:
        self._catch_up()  # what others were served counts, and whose turn it was
        super().add(request)

    def collect(
        self, result: StepResult, now: float | None = None, at: Arrived | None = None
    ) -> list[Update]:
        rows = {row.row for row in result.rows}
        lanes = [lane for lane in self._open if lane.tenancy.row in rows]
        for lane in lanes:
            self._tell(lane)
        self._hear()
        updates = super().collect(result, now, at)
        self._letter, self.changed = result.round_id, True
        for lane in lanes:
            before = lane.safe, lane.due
            if lane.tenancy.open and self._set_watch(lane) != before:
                self._watch.enter(lane)
        return updates

    @property
    def _nobody_comes(self) -> bool:
        """Whoever waits, no letter will give them a row."""
        if self._lanes is None:
            self._find_lanes()
        if self._prefilling or not self.roster.waiting:
            return not self._prefilling
        self._hear()
        rows = self.roster.reservations.rows
        return not rows.free and not rows.due

    @property
    def _prompts(self) -> bool:
        """Somebody is on the way through a prompt, or waits and may get a row."""
        if self._lanes is None:
            self._find_lanes()
        if self._prefilling or not self.roster.waiting:
            return self._prefilling
        self._hear()
        return self.roster.reservations.rows.free > 0

    def _go_on(self) -> bool:
        """Some rows decode, and all that do have pages for a round."""
        if self._lanes is None:
            self._find_lanes()
        if not self._checked():
            self._lanes = None  # the rest has not been looked at
        return bool(self._lanes)

    def _checked(self) -> bool:
        """All that go on have pages for a round."""
        lanes = sorted(self._watch.checks(self._read - 1), key=_rank)
        for lane in lanes:
            self._tell(lane)
            if not lane.request.decodes:
                self._leave(lane)
        for at, lane in enumerate(lanes):
            if lane.end == NEVER:
                if not self._extended(lane):
                    for one in lanes[at:]:
                        self._watch.enter(one)
                    return False
                self._look_again(lane)
        return True

    def _extended(self, lane: Lane) -> bool:
        """It has pages for its next round; they are what `plan` would take, if anything."""
        footprint, tenancy = self.roster.footprint, lane.tenancy
        tokens = footprint.decode_tokens(tenancy.upper)
        if tokens <= tenancy.room:
            return True
        self._hear()
        self.changed = True
        return self.roster.reservations.extend(tenancy, tokens)

    def _find_lanes(self) -> None:
        """Those who go on, the best rank first; their letters are told."""
        for lane in self._open:
            self._tell(lane)
        going = {one.tenancy: one for one in self._open if one.end == NEVER}
        self._open = [lane for lane in self._open if lane.tenancy.open and lane.read < lane.end]
        self._lanes, self._prefilling = list[Lane](), False
        for request in self.roster.ranked:
            tenancy = self.roster.tenancy(request)
            if tenancy.prefilling:
                self._prefilling = True
            lane = going.get(tenancy)
            if request.decodes:
                self._lanes.append(self._new_lane(request, tenancy) if lane is None else lane)
            elif lane is not None:
                lane.stop(self._launched)
        self._watch = Watch()
        for lane in self._open:
            self._watch.enter(lane)

    def _new_lane(self, request: Request, tenancy: Tenancy) -> Lane:
        row = self._device.row(tenancy.row)
        lane = Lane.of(request, tenancy, row, self._device.luck, self._launched)
        lane.before = next((one for one in reversed(self._open) if one.tenancy is tenancy), None)
        self._open.append(lane)
        self._set_watch(lane)
        return lane

    def _leave(self, lane: Lane) -> None:
        lane.stop(self._launched)
        self._lanes = [one for one in self._lanes or [] if one is not lane]

    @property
    def _shape(self) -> StepShape:
        """Of the next stride."""
        count = len(self._lanes or [])
        found = self._shapes.get(count)
        if found is None:
            found = self._shapes[count] = self.ladder.fit_decode(count)
        return found

    def _under_way(self, seconds: list[float]) -> list[Stride]:
        shape, first = self._shape, self._next_round
        strides = [Stride(first + at, shape, one) for at, one in enumerate(seconds)]
        self._rounds.extend([(stride, []) for stride in strides])
        self._next_round += len(strides)
        self._count_rounds(len(seconds))
        return strides

    def _count_rounds(self, count: int) -> None:
        if count:
            self._kinds.ran(prompts=False, rounds=count)
            self._launched += count
            self._latest = self._next_round - 1

    def _finished(self, lane: Lane) -> None:
        self.roster.reservations.publish(lane.request, lane.tenancy, FinishReason.LENGTH)
        self._end(lane.request, FinishReason.LENGTH)
        if lane.end == NEVER:
            self._leave(lane)

    def _look_again(self, lane: Lane) -> None:
        """It was looked at, and will be again."""
        self._set_watch(lane)
        self._watch.enter(lane)

    def _set_watch(self, lane: Lane) -> tuple[int, int]:
        """When it is to be looked at next: its `safe` and `due`."""
        lane.turn_over()
        tenancy, decode, rounds = lane.tenancy, self.roster.footprint.decode, self.run_ahead
        own = decode.width * (lane.launched - lane.read)
        lane.safe = lane.stays = -1
        # else rounds of the engine's own are in flight, which may bring less than they could
        if tenancy.lower + tenancy.pending - own == lane.known(lane.read) - 1:
            room = tenancy.room - decode.reach - rounds * decode.width + 1
            lane.stays = lane.last_within(lane.limit - rounds - 1)
            lane.safe = min(lane.stays, lane.last_within(room))
            # before its first round nothing of it is read, whatever else is
            lane.stays = -1 if lane.stays < lane.read else lane.stays
            lane.safe = -1 if lane.safe < lane.read else lane.safe
        lane.ends = lane.first_with(lane.limit)
        due = lane.ends
        if tenancy.due < lane.limit - 1:
            due = lane.first_with(tenancy.due + 1)
        # the prompt's letter, which will say when, is read before any of a stride
        lane.due = NEVER if tenancy.due == NOT_KNOWN else max(due, lane.read + 1)
        return lane.safe, lane.due

    def _catch_up(self) -> None:
        """All is as if every round had been planned and every letter collected."""
        for lane in self._open:
            self._tell(lane)
        self._take_turns()
        self._hear()

    def _take_turns(self) -> None:
        """As in `launch`, round by round, but for rounds that later ones of the same row hide."""
        if self._since == self._next_round:
            return
        lanes = [lane for lane in self._open if lane.tenancy.last_round >= self._since]
        for lane in sorted(lanes, key=lambda one: (one.tenancy.last_round, one.request.turn)):
            lane.request.turn = next(self._turns)
        self._since = self._next_round

    def _tell(self, lane: Lane) -> None:
        """Its tenancy and its request know what was launched and what came."""
        if lane.before is not None:
            self._tell(lane.before)
            lane.before = None if lane.before.read == lane.before.end else lane.before
        if lane.read == self._read and lane.launched == self._launched:
            return
        tenancy, request = lane.tenancy, lane.request
        launched, read = lane.own(self._launched), lane.own(self._read)
        rounds, letters = launched - lane.launched, read - lane.read
        if not tenancy.open or not (rounds or letters):
            return
        lane.launched, lane.read = launched, read
        decode = self.roster.footprint.decode
        if rounds:
            tenancy.last_round, tenancy.drafts = self._latest, decode.depth
        tenancy.pending += (rounds - letters) * decode.width
        tenancy.owed += rounds - letters
        known = lane.known(read)
        if known > lane.told:
            tenancy.lower += known - lane.told
            request.output += (known - lane.told) * [0]  # nobody reads it
            self.roster.waiting.tenants.charge(request.tenant, known - lane.told)
            lane.told = known
        request.stats.decode_rounds += letters

    def _hear(self) -> None:
        """Pools know which letters were read."""
        if self._heard < self._letter:
            self.roster.reservations.collected(self._letter)
            self._heard = self._letter
