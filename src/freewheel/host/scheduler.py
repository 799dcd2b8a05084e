# SPDX-License-Identifier: Apache-2.0
"""Continuous batching with rounds in flight: what runs next, and what the letters mean."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from freewheel.errors import ConfigError, FreewheelError, RequestError
from freewheel.host.alarm import Alarm
from freewheel.host.chunks import widest_chunk
from freewheel.host.costs import Arrived, Pace
from freewheel.host.depth import DepthPolicy
from freewheel.host.disk import DiskIndex
from freewheel.host.footprint import Footprint
from freewheel.host.interleaving import Interleaving
from freewheel.host.rectangles import Rectangles
from freewheel.host.request import Request
from freewheel.host.roster import Roster
from freewheel.host.seats import (
    DecodeSeats,
    Seat,
    prompt_seats,
    step_plan,
    within,
)
from freewheel.host.shelf import Shelf
from freewheel.host.update import Update
from freewheel.spec import (
    TABLES,
    CacheGroup,
    FinishReason,
    ShapeLadder,
    StepPlan,
    StepResult,
    StepShape,
    TableWrite,
    Transfer,
    TransferResult,
    Violation,
)

_turn = attrgetter("request.turn")


class Scheduler:
    """Turns requests into rounds, and letters into tokens. Same calls, same plans.

    `group_pages` and `rows` count scratch page 0 and scratch row 0. `chunk` caps the width of
    prompt rectangles (None: the ladder's widest). Up to `run_ahead` rounds may be in flight when
    another is planned; 0 means launch, collect, launch. Raises ConfigError on options that are
    out of range or contradict one another.

    Policy:

    - *Kinds.* A round is for prompts or for decoding. While both have work, prompts get
      `prefill_share` of the rounds, so neither starves the other: more shortens the time to the
      first token, less the time between tokens. A prompt's remainder runs in a prompt rectangle,
      however short. The round of the last chunk emits the first token, and the row decodes from
      the next round on, without waiting for that letter.
    - *Prompts.* By priority, then served or queued longest ago goes first; `chunks.sharing` says
      how many share the rectangle. Within a priority tenants are served evenly, and each of them
      first come, first served (`queue.Queue`). However much of better priority comes, whoever
      waits gets a turn (`roster.PATIENCE`). The head of the queue gets a row when its prompt and
      first decoding round fit into what is free beyond the needs of running requests (the rest of
      their prompts; their next decoding round; at least one page each).
    - *Tables.* A waiting request whose grammar is not on the device has its table brought by rounds
      of their own, before anything else runs; the request is admitted behind them. `shelf` says
      how many there is room for (None: for none).
    - *Masks.* Where the host follows a request's grammar, the row takes part in a round only with
      the mask for its next token, which is made once its last letter was read. Others go on.
    - *Depth.* `policy` chooses among the ladder's depths; without one there is only one.
    - *Decoding.* All rows; if they exceed the ladder's batch, those that were launched longest
      ago.
    - *Prefixes.* Pages stay when their request ends, and a request that begins like an earlier
      one starts behind what they hold (`prefix.PrefixCache`).
      `host_slots`: blocks that host memory holds besides (`moves.Moves`).
    - *Short of pages.* Kept pages that nobody reads go first, the least recently used before
      others. A row whose letters are outstanding, or whose need is in quarantine, sits
      the round out. Otherwise the request of the worst priority, and of those the youngest, is
      preempted, until the pages suffice: it goes to the head of its queue, to compute prompt and
      output anew. The oldest of the best priority always stays.
    """

    def __init__(  # noqa: PLR0913
        self,
        ladder: ShapeLadder,
        groups: tuple[CacheGroup, ...],
        group_pages: tuple[int, ...],
        rows: int,
        context_len: int,
        row_width: int,
        run_ahead: int,
        *,
        chunk: int | None = None,
        prefix_cache: bool = True,
        shelf: Shelf | None = None,
        prefill_share: float = 0.5,
        policy: DepthPolicy | None = None,
        host_slots: int = 0,
        alarm: Alarm | None = None,
        disk: DiskIndex | None = None,
    ) -> None:
        if len(groups) != len(group_pages) or not groups:
            raise ConfigError(f"group_pages: {len(group_pages)} given for {len(groups)} groups")
        if not 2 <= context_len <= row_width:
            raise ConfigError(f"context_len: must be 2 to row_width {row_width}, got {context_len}")
        if run_ahead < 0:
            raise ConfigError(f"run_ahead: must be at least 0, got {run_ahead}")
        if not 0 < prefill_share < 1:
            raise ConfigError(f"prefill_share: must be between 0 and 1, got {prefill_share}")
        self.ladder = ladder
        self.context_len = context_len
        self.run_ahead = run_ahead
        width = widest_chunk(ladder, chunk)
        footprint = Footprint(groups, group_pages, ladder.decode[-1], width, row_width, ladder.lag)
        self.roster = Roster(
            footprint, rows, shelf or Shelf(0, 0, 0), prefix_cache, host_slots, disk
        )
        self._decoding = DecodeSeats(self.roster, ladder.max_batch, shared=policy is None)
        self._live: dict[str, Request] = {}
        self._just_ended: dict[str, Request] = {}
        self._rounds: deque[tuple[StepPlan, list[Seat]]] = deque()
        self._pace = Pace()
        self._policy, self._listens = policy, False
        self._rectangles = Rectangles(ladder, policy)
        self.alarm = Alarm() if alarm is None else alarm
        self._next_round = 0
        self._turns = itertools.count()
        self._kinds = Interleaving(prefill_share)

    @property
    def in_flight(self) -> int:
        """Rounds planned and not yet collected."""
        return len(self._rounds)

    @property
    def copies(self) -> tuple[Scheduler, ...]:
        """Of the model, each with its own rows and pages: this one."""
        return (self,)

    def lives(self, request_id: str) -> bool:
        """The request has not ended."""
        return request_id in self._live

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and every round has been collected."""
        return not self._live and not self._rounds

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `check` raises."""
        self.check(request)
        request.arrival = request.turn = next(self._turns)
        request.follow()
        self._live[request.id] = request
        self.roster.waiting.tenants.enter(request.tenant)
        self.roster.waiting.add(request)

    def check(self, request: Request) -> None:
        """Whether `add` would take the request.

        Raises RequestError for an id in use, an empty prompt, or one that leaves no room for an
        answer; CapacityError if the pages could never hold it.
        """
        if request.id in self._live:
            raise RequestError("id", f"{request.id!r} is in use by a live request")
        request.check(self.context_len)
        self.roster.footprint.check(request)

    def abort(self, request_id: str) -> Update | None:
        """End a request now and drop what is in flight for it. None if it is not live."""
        request = self._live.get(request_id)
        if request is None:
            return None
        self._end(request, FinishReason.ABORT)
        return Update(request, (), 0, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason, length: int | None = None) -> bool:
        """End a request for a reason that only the host sees, such as a stop string.

        `length`: how many of its output tokens count (None: all so far). If the device ended the
        request in the letter collected last, `reason` and `length` replace the device's: the stop
        string came first. False, and no change, for any other request that is not live.
        """
        request = self._live.get(request_id)
        if request is not None:
            self._end(request, reason, length)
            return True
        if request_id not in self._just_ended:
            return False
        self._just_ended[request_id].end(reason, length)
        return True

    def failed(self) -> list[Update]:
        """Ends requests whose grammar the host could not follow any further."""
        lost = [r for r in self._live.values() if r.guide is not None and r.guide.failure]
        for request in lost:
            self._end(request, FinishReason.ERROR)
        return [Update(request, (), 0, FinishReason.ERROR) for request in lost]

    def transfers(self, fresh: bool = True) -> list[Transfer]:
        """Copies to and from host memory that are to start now, behind the round planned last.

        `fresh`: also of pages that are merely new.
        """
        moves = self.roster.reservations.moves
        return [] if moves is None else moves.due(fresh)

    def transferred(self, result: TransferResult) -> None:
        """A transfer has ended, in any order. Raises FreewheelError if it is not under way."""
        moves = self.roster.reservations.moves
        if moves is None:
            raise FreewheelError(f"transfer {result.id} ended, but none is under way")
        moves.ended(result)

    @property
    def moving(self) -> int:
        """Transfers that have not ended."""
        moves = self.roster.reservations.moves
        return 0 if moves is None else moves.moving

    def wait(self, seconds: float) -> None:
        """With nothing to plan and nothing in flight: until a request's mask may be there."""
        for request in self._live.values():
            if request.guide is not None and request.held:
                request.guide.wait(seconds)
                return

    def plan(self) -> StepPlan | None:
        """The next round; None if there is no work, or if a letter or a mask must come first."""
        if self.in_flight > self.run_ahead:
            return None
        table = self.due_table()
        if table is not None:
            return self.launch(TABLES, [], table)
        tenants = len(self.roster.running)
        first = self._kinds.prompts_first
        for prompts in (first, not first):
            plan = self.round(prompts)
            if plan is not None:
                return plan
        if len(self.roster.running) < tenants:
            return self.plan()  # all who were chosen lost their rows: choose among those who stay
        self.check_stuck()
        return None

    def due_table(self) -> TableWrite | None:
        """What of a waiting request's grammar must be brought before anything else runs."""
        if not self.roster.waiting.grammars:
            return None
        return self.roster.shelf.due(self.roster.waiting)

    def round(self, prompts: bool) -> StepPlan | None:
        """A round of this kind, which is then under way; None if there are no rows for it."""
        seats = self.seats(prompts)
        if not seats:
            return None
        self._kinds.ran(prompts)
        shape = self.shape([seats], prompts)
        many = not prompts and self._policy is not None
        return self.launch(shape, within(seats, shape) if many else seats)

    def seats(self, prompts: bool) -> list[Seat]:
        """Rows for a round of this kind, which is then to be launched."""
        if prompts:
            return prompt_seats(self.roster, self.ladder)
        return self._decoding.take()

    def check_stuck(self) -> None:
        """With no row to run. Raises FreewheelError if none ever will."""
        # A mask may have come since its row was left out.
        moves = self.roster.reservations.moves
        comes = self.moving or (moves is not None and moves.arriving)
        stuck = self._live and not self._rounds and not comes
        if stuck and all(r.guide is None for r in self._live.values()):
            loss = self.roster.reservations.loss
            raise FreewheelError(f"requests wait, nothing is in flight, and no row can run{loss}")

    def collect(
        self, result: StepResult, now: float | None = None, at: Arrived | None = None
    ) -> list[Update]:
        """Read the letter of the oldest round in flight. `now`: the time, for statistics; `at`: by
        the clock that times rounds.

        Rows without new tokens, and tenancies that have ended since the launch, give no update.
        Raises FreewheelError if this letter is not the one that is due.
        """
        seats = self._due(result, at)
        self._just_ended = {}
        reserved, tenants = self.roster.reservations, self.roster.waiting.tenants
        updates: list[Update] = []
        listens = self._policy if self._listens else None
        for seat, row in zip(seats, result.rows, strict=True):
            request, tenancy, tokens = seat.request, seat.tenancy, row.tokens
            if not tenancy.open:
                request.stats.dropped += len(tokens)
                continue
            if row.violation is not None:
                updates += self._violated(seat, row.violation)
                continue
            tenancy.settle(row.computed, seat.advance, seat.emits)
            request.stats.count(row, seat.start is not None, result.round_id, now)
            if listens is not None and row.finish is None and not request.guided:
                left = request.limit - request.known - len(tokens)
                listens.count(request.id, seat.offered, row.agreed, left)
            request.take(row, seat.start)
            tenants.charge(request.tenant, len(tokens))
            if row.finish is not None:
                reserved.publish(request, tenancy, row.finish)
                self._end(request, row.finish)
                self._just_ended[request.id] = request
            elif not tokens:
                reserved.settled(request, tenancy)
                continue
            else:
                if request.guide is not None:
                    request.follow()
                reserved.settled(request, tenancy)
            updates.append(Update(request, tokens, row.agreed, row.finish, row.drafted))
        reserved.collected(result.round_id)
        return updates

    def _violated(self, seat: Seat, violation: Violation) -> list[Update]:
        """A canary has struck the row: nothing that is in flight for it counts."""
        request, reserved = seat.request, self.roster.reservations
        pages = reserved.condemn(seat.tenancy, violation.columns)
        if self.alarm.raised(request, violation, pages):
            self.roster.preempt(request)
            return []
        self._end(request, FinishReason.ERROR)
        return [Update(request, (), 0, FinishReason.ERROR)]

    def launch(
        self, shape: StepShape, seats: list[Seat], table: TableWrite | None = None
    ) -> StepPlan:
        """The round of these seats is under way from here on."""
        plan = step_plan(self._next_round, shape, seats, table)
        # Whoever waited longest in this round is also first of it to wait for its next turn.
        ordered = sorted(seats, key=_turn) if len(seats) > 1 else seats
        round_id, depth, lagging = plan.round_id, shape.depth, bool(self.ladder.lag)
        for seat in ordered:
            tenancy, lag = seat.tenancy, None
            if lagging:
                lag = tenancy.lag + 1 if shape.lags else 0
            tenancy.launch(round_id, seat.advance, seat.emits, depth, lag)
            seat.request.turn = next(self._turns)
        self._rounds.append((plan, seats))
        self._next_round += 1
        return plan

    def _due(self, result: StepResult, at: Arrived | None) -> list[Seat]:
        if not self._rounds:
            raise FreewheelError(f"letter of round {result.round_id}, but none is in flight")
        plan, seats = self._rounds[0]
        rows = tuple([row.row for row in result.rows])
        if rows != plan.rows or result.round_id != plan.round_id:
            expected, got = (plan.round_id, plan.rows), (result.round_id, rows)
            raise FreewheelError(f"letter of (round, rows) {got}; {expected} is due")
        if self._policy is not None:
            took = self._pace.letter(plan.shape, (p.shape for p, _ in self._rounds), at)
            self._listens = plan.shape.for_prompts or self._policy.listens(plan.round_id)
            if self._listens and took is not None and not plan.shape.for_prompts:
                self._policy.took(plan.shape, *took)
        self._rounds.popleft()
        return seats

    def lose(self) -> None:
        """With rounds that nobody collects: whoever outlives this scheduler forgets its requests.

        Nothing else here is called any more.
        """
        for request in self._live.values():
            if request.guide is not None:
                request.guide.close()
            if self._policy is not None:
                self._policy.forget(request.id)
        self._live.clear()

    def shape(self, copies: Sequence[list[Seat]], prompts: bool) -> StepShape:
        """The smallest rectangle for the rows of every copy of the model; some copy has some."""
        return self._rectangles.of(copies, prompts)

    def _end(self, request: Request, reason: FinishReason, length: int | None = None) -> None:
        request.end(reason, length)
        if request.guide is not None:
            request.guide.close()
        if self._policy is not None:
            self._policy.forget(request.id)
        self.roster.leave(request)
        self.roster.shelf.release(request)
        self.roster.waiting.tenants.leave(request.tenant)
        del self._live[request.id]
