# SPDX-License-Identifier: Apache-2.0
"""Who waits and who has a row: admission, preemption and the end of a stay."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from freewheel.errors import FreewheelError
from freewheel.host.disk import DiskIndex
from freewheel.host.footprint import Footprint
from freewheel.host.queue import Queue
from freewheel.host.request import Request, RequestState
from freewheel.host.reserve import Reservations
from freewheel.host.shelf import Shelf
from freewheel.host.tenancy import Tenancy
from freewheel.spec import PageWrite

PATIENCE = 8
"""Prompt rounds in which better priorities may pass whoever has waited longest, before it is their
turn to wait: so the lowest priority has a ninth of the rounds, however much comes above it."""


class Roster:
    """The waiting queue, the rows' tenants in order of admission, and what both may hold."""

    def __init__(
        self,
        footprint: Footprint,
        rows: int,
        shelf: Shelf,
        prefix_cache: bool,
        host_slots: int = 0,
        disk: DiskIndex | None = None,
    ) -> None:
        self.footprint = footprint
        self.shelf = shelf
        self.reservations = Reservations(
            footprint.groups, footprint.group_pages, rows, prefix_cache, host_slots, disk
        )
        self.waiting = Queue()
        self.running: list[Request] = []
        self._ranked: list[Request] | None = None
        self._passed = 0

    @property
    def ranked(self) -> list[Request]:
        """Running requests, the best rank first; not to be changed."""
        if self._ranked is None:
            self._ranked = sorted(self.running, key=attrgetter("rank"))
        return self._ranked

    def tenancy(self, request: Request) -> Tenancy:
        """The tenancy of a running request. Raises FreewheelError if it has none."""
        if request.tenancy is None:
            raise FreewheelError(f"request {request.id!r} has no row")
        return request.tenancy

    def admissible(self) -> Iterator[Request]:
        """Waiting requests, from the head of the queue on, for which there are rows and pages.

        None behind a request whose grammar's table is not on the device yet.

        Each is counted with the pages that it needs to begin decoding; so is every running
        request, or with those for its next decoding round, and never with less than one page.
        Pages that it would share with a running one are not counted twice. A request that begins
        like another's prompt waits until that prompt's pages are there to share, and lets others
        pass; so does one that waits for a mask, or for pages from host memory, which are sent for
        when it could have its row.
        """
        if not self.waiting or not self.reservations.rows.free:
            return
        spare = self.reservations.spare
        for request in self.running:
            spare = [a - b for a, b in zip(spare, self._outstanding(request), strict=True)]
        ahead = list(self.running)
        rows = self.reservations.rows.free
        for request in self.waiting:
            if rows == 0:
                return
            if request.held:
                continue
            blocks = self.reservations.match(request)
            if self._awaits(request, len(blocks), ahead):
                continue
            tokens = self.footprint.start_tokens(request.known, request.limit)
            need = [self.footprint.pages(group, tokens) for group in self.footprint.groups]
            shared = self.reservations.shared(blocks)
            left = [a - b + c for a, b, c in zip(spare, need, shared, strict=True)]
            if min(left, default=0) < 0 or not self.shelf.ready(request):
                return
            before = self.reservations.spare
            if self.reservations.fetch(request, blocks):
                taken = zip(spare, before, self.reservations.spare, strict=True)
                spare = [a - b + c for a, b, c in taken]
                continue
            spare = left
            rows -= 1
            ahead.append(request)
            yield request

    def _awaits(self, request: Request, blocks: int, ahead: list[Request]) -> bool:
        """Another row will soon give this request more than its first `blocks` blocks.

        Its tokens are known, so rounds in flight or still to come compute them: it need not wait
        for anything that is yet to be decided.
        """
        prefix = self.reservations.prefix
        if prefix is None:
            return False
        have, most = blocks * prefix.block_size, request.reusable
        shared = ((other, min(prefix.common(request, other), most)) for other in ahead)
        return any(other.lower < tokens >= have + prefix.block_size for other, tokens in shared)

    def admit(self, request: Request) -> None:
        """Give a waiting request a row."""
        self.waiting.remove(request)
        request.tenancy = self.reservations.admit(request, self._wanted)
        if not request.preempted:
            prefix, fetched = self.reservations.prefix, request.fetched or (0, 0)
            size = 0 if prefix is None else prefix.block_size
            request.stats.found(request.tenancy.start, fetched, request.filed, size)
            self.waiting.tenants.charge(request.tenant, request.known - request.tenancy.start)
        self.running.append(request)
        self._ranked = None

    def served(self, chosen: list[Request], started: list[Request]) -> None:
        """A prompt round takes these, and leaves others of `started` and of the queue waiting.

        Once PATIENCE rounds have given better priorities the preference, the one that has waited
        longest of those they passed becomes overdue.
        """
        for request in chosen:
            request.overdue = False
        best = min((request.priority for request in chosen), default=0)
        left = [request for request in started if request not in chosen and not request.overdue]
        passed = [r for r in (*left, *self.waiting.heads()) if r.priority > best]
        if not chosen or not passed:
            return
        oldest = min(passed, key=lambda request: request.turn)
        self._passed += 1
        if self._passed < PATIENCE:
            return
        self._passed, oldest.shielded = 0, True
        self._ranked = None
        if oldest.tenancy is None:
            self.waiting.hurry(oldest)
        else:
            oldest.overdue = True

    def secure(self, request: Request, tokens: int) -> tuple[PageWrite, ...] | None:
        """Pages for the first `tokens` tokens, at the price of lesser requests if need be.

        None: the row sits this round out, or has itself been preempted. Waiting for the row's own
        letters comes first, because its bounds may tighten; then waiting for quarantined pages.
        """
        tenancy = self.tenancy(request)
        while True:
            writes = self.reservations.reserve(tenancy, tokens)
            if writes is not None:
                return writes
            if tenancy.pending or self.reservations.promised(tenancy, tokens):
                return None
            if len(self.running) == 1:
                raise FreewheelError(
                    f"request {request.id!r} was admitted, but can never fit"
                    f"{self.reservations.loss}"
                )
            victim = max(self.running, key=lambda running: running.rank)
            self.preempt(victim)
            if victim is request:
                return None

    def preempt(self, request: Request) -> None:
        """Back to the head of its priority's queue, to compute prompt and output so far anew, but
        for blocks that are found when it has its next row."""
        self.leave(request)
        request.stats.preemptions += 1
        request.overdue = request.shielded
        request.fetched, request.filed, request.lifted = None, (), False
        self.waiting.add(request)

    def leave(self, request: Request) -> None:
        """Take the request off: out of the queue, or out of its row and pages."""
        if request.tenancy is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._ranked = None
        self.reservations.release(request.tenancy)
        request.tenancy = None

    def _wanted(self, request: Request) -> list[int]:
        """Pages of each group that running requests need, and this one behind its certain tokens
        to begin decoding."""
        tokens = self.footprint.start_tokens(request.known, request.limit)
        own = [
            max(0, group.pages_for(tokens) - group.pages_for(request.known))
            for group in self.footprint.groups
        ]
        others = [self._outstanding(one) for one in self.running]
        return [sum(each) for each in zip(own, *others, strict=True)]

    def _outstanding(self, request: Request) -> tuple[int, ...]:
        tenancy = self.tenancy(request)
        if request.state is RequestState.DECODING:
            tokens = self.footprint.decode_tokens(tenancy.upper)
            missing = self.reservations.missing(tenancy, tokens)
        else:
            tokens = self.footprint.start_tokens(tenancy.known, tenancy.limit)
            missing = tuple(
                self.footprint.pages(group, tokens) - len(span.pages)
                for group, span in zip(self.footprint.groups, tenancy.spans, strict=True)
            )
        return tuple(max(1, count) for count in missing)
