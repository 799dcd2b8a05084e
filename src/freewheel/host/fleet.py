# SPDX-License-Identifier: Apache-2.0
"""One plan for several copies of a model, whose rounds go in step: all of one shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from freewheel.errors import RequestError
from freewheel.host.costs import Arrived
from freewheel.host.interleaving import Interleaving
from freewheel.host.request import Request
from freewheel.host.scheduler import Scheduler
from freewheel.host.seats import within
from freewheel.host.update import Update
from freewheel.spec import TABLES, FinishReason, StepPlan, StepResult, Transfer, TransferResult

PER_REQUEST = 512
"""Prompt tokens that count as much as one more request to decode."""


class Fleet:
    """As a Scheduler, over one for each copy: rows and pages are a copy's own.

    Policy: a request goes to the copy where the prompt tokens still to be computed and the requests
    under way are fewest, those of its own prompt that the copy has cached, on the device or below
    it, counted off; of equals to the first. It stays there. Every round is one of all copies,
    for prompts or for decoding, in a rectangle that has room for the rows of any of them: a copy
    without such rows idles in it.
    Within a copy all is as the Scheduler says.
    """

    def __init__(self, copies: Sequence[Scheduler], prefill_share: float) -> None:
        """`copies`: alike, and with the same depth policy if any."""
        self.copies = tuple(copies)
        self._first = self.copies[0]
        self._share_keys()
        self._kinds = Interleaving(prefill_share)
        self._home: dict[str, Scheduler] = {}
        self._assigned: dict[str, Scheduler] = {}

    @property
    def run_ahead(self) -> int:
        """Rounds that may be in flight when another is planned."""
        return self._first.run_ahead

    @property
    def in_flight(self) -> int:
        """Rounds planned and not yet collected."""
        return self._first.in_flight

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and every round has been collected."""
        return all(copy.idle for copy in self.copies)

    def add(self, request: Request) -> None:
        """Queue a request with one of the copies. Raises what `check` raises."""
        self.check(request)
        copy = self._assigned.get(request.id) or self._cheapest(request)
        copy.add(request)
        self._assigned.pop(request.id, None)
        self._home[request.id] = copy

    def assign(self, request: Request) -> int:
        """The copy that will serve a request which is to be added later. Until then it counts
        there as one that waits."""
        copy = self._assigned[request.id] = self._cheapest(request)
        return self.copies.index(copy)

    def release(self, request_id: str) -> None:
        """A request that was assigned may go to any copy, or will not come."""
        self._assigned.pop(request_id, None)

    def home(self, request_id: str) -> int:
        """The copy that serves a live request."""
        return self.copies.index(self._home[request_id])

    def check(self, request: Request) -> None:
        """Whether `add` would take the request. Raises what `Scheduler.check` raises."""
        if self._lives(request.id):
            raise RequestError("id", f"{request.id!r} is in use by a live request")
        if request.shows:
            raise RequestError(
                "prompt", "what a token picks can be asked of an engine of dp 1 only"
            )
        self._first.check(request)

    def abort(self, request_id: str) -> Update | None:
        """As `Scheduler.abort`."""
        copy = self._home.pop(request_id, None)
        return None if copy is None else copy.abort(request_id)

    def finish(self, request_id: str, reason: FinishReason, length: int | None = None) -> bool:
        """As `Scheduler.finish`."""
        self._home.pop(request_id, None)
        return any(copy.finish(request_id, reason, length) for copy in self.copies)

    def lose(self) -> None:
        """As `Scheduler.lose`."""
        for copy in self.copies:
            copy.lose()
        self._home.clear()
        self._assigned.clear()

    def failed(self) -> list[Update]:
        """As `Scheduler.failed`."""
        return self._ended([update for copy in self.copies for update in copy.failed()])

    def wait(self, seconds: float) -> None:
        """As `Scheduler.wait`."""
        for copy in self.copies:
            if copy.live:
                copy.wait(seconds)
                return

    def transfers(self, fresh: bool = True) -> list[Transfer]:
        """As `Scheduler.transfers`, of every copy."""
        return [
            replace(transfer, replica=at)
            for at, copy in enumerate(self.copies)
            for transfer in copy.transfers(fresh)
        ]

    def transferred(self, result: TransferResult) -> None:
        """As `Scheduler.transferred`, of the copy whose it is."""
        self.copies[result.replica].transferred(result)

    @property
    def moving(self) -> int:
        """Transfers that have not ended."""
        return sum(copy.moving for copy in self.copies)

    def plan(self) -> StepPlan | None:
        """The next round; None if there is no work, or if a letter or a mask must come first."""
        if self.in_flight > self.run_ahead:
            return None
        tables = [copy.due_table() for copy in self.copies]
        if any(table is not None for table in tables):
            pairs = zip(self.copies, tables, strict=True)
            return _together([copy.launch(TABLES, [], table) for copy, table in pairs])
        tenants = self._tenants
        first = self._kinds.prompts_first
        for prompts in (first, not first):
            plan = self._plan(prompts)
            if plan is not None:
                return plan
        if self._tenants < tenants:
            return self.plan()  # all who were chosen lost their rows: choose among those who stay
        for copy in self.copies:
            copy.check_stuck()
        return None

    def collect(
        self, result: StepResult, now: float | None = None, at: Arrived | None = None
    ) -> list[Update]:
        """As `Scheduler.collect`, for every copy."""
        pairs = zip(self.copies, result.each, strict=True)
        return self._ended([one for copy, own in pairs for one in copy.collect(own, now, at)])

    def _cheapest(self, request: Request) -> Scheduler:
        held = Counter(id(copy) for copy in self._assigned.values())
        return min(self.copies, key=lambda one: _cost(one, request) + PER_REQUEST * held[id(one)])

    def _share_keys(self) -> None:
        """All copies know a block by the same key: a request brings its keys to all of them."""
        own = self._first.roster.reservations.prefix
        for copy in self.copies[1:]:
            prefix = copy.roster.reservations.prefix
            if own is not None and prefix is not None:
                prefix.share_keys(own)

    def _ended(self, updates: list[Update]) -> list[Update]:
        for update in updates:
            if update.finish is not None:
                self._home.pop(update.request.id, None)
        return updates

    @property
    def _tenants(self) -> int:
        return sum(len(copy.roster.running) for copy in self.copies)

    def _lives(self, request_id: str) -> bool:
        copy = self._home.get(request_id)
        return copy is not None and copy.lives(request_id)

    def _plan(self, prompts: bool) -> StepPlan | None:
        """The next round for prompts, or for decoding, if any copy has rows for it."""
        seats = [copy.seats(prompts) for copy in self.copies]
        if not any(seats):
            return None
        self._kinds.ran(prompts)
        shape = self._first.shape(seats, prompts)
        if not prompts:
            seats = [within(own, shape) for own in seats]
        pairs = zip(self.copies, seats, strict=True)
        return _together([copy.launch(shape, own) for copy, own in pairs])


def _together(plans: Sequence[StepPlan]) -> StepPlan:
    return replace(plans[0], others=tuple(plans[1:]))


def _cost(copy: Scheduler, request: Request) -> int:
    """Of having the request served there, in prompt tokens."""
    roster = copy.roster
    waiting = sum(one.known for one in roster.waiting)
    prompts = sum(max(0, one.known - one.upper) for one in roster.running)
    prefix, moves = roster.reservations.prefix, roster.reservations.moves
    cached = 0
    if prefix is not None:
        blocks = len(roster.reservations.match(request))
        blocks = blocks if moves is None else max(blocks, moves.known(request))
        cached = blocks * prefix.block_size
    return waiting + prompts + PER_REQUEST * copy.live - cached
