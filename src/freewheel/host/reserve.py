# SPDX-License-Identifier: Apache-2.0
"""Pages and rows of running requests: reserved ahead, freed behind, released in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

from freewheel.host.disk import DiskIndex
from freewheel.host.moves import Moves
from freewheel.host.pages import PageAllocator, RowAllocator
from freewheel.host.prefix import PrefixCache
from freewheel.host.request import Request
from freewheel.host.runs import Match
from freewheel.host.tenancy import PageSpan, Tenancy
from freewheel.host.tier import HostTier
from freewheel.spec import CacheGroup, FinishReason, PageCopy, PageWrite

FOREVER = 1 << 62
"""More tokens than any row has."""


class Reservations:
    """The row pool and one page pool for each cache group.

    Whatever a tenancy gives back is quarantined until the last round launched with it has been
    collected. `finish`, abort and preemption all go through `release`. Pages that the prefix cache
    keeps are handed out again when no others are left.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        group_pages: tuple[int, ...],
        rows: int,
        prefix_cache: bool,
        host_slots: int = 0,
        disk: DiskIndex | None = None,
    ) -> None:
        """`prefix_cache`: keep pages for later requests; groups that all forget have nothing to
        keep. `host_slots`: blocks of them that host memory holds besides.
        `disk`: what files hold below it."""
        self.pools = tuple(
            PageAllocator(group, pages) for group, pages in zip(groups, group_pages, strict=True)
        )
        self._page_sizes = tuple(group.page_size for group in groups)
        self.rows = RowAllocator(rows)
        self.forgets = any(group.retention is not None for group in groups)
        keeps = prefix_cache and any(group.retention is None for group in groups)
        secret = None if disk is None else disk.secret
        self.prefix = PrefixCache(self.pools, secret) if keeps else None
        self.moves: Moves | None = None
        if self.prefix is not None and host_slots:
            self.moves = Moves(self.pools, self.prefix, HostTier(host_slots), disk)
            self.prefix.watcher = self.moves

    @property
    def spare(self) -> list[int]:
        """Pages of each group that can be had at once: free ones, and those that the prefix cache
        can let go of."""
        return [pool.free + pool.reclaimable for pool in self.pools]

    def match(self, request: Request) -> Match:
        """Kept blocks that the request could start behind."""
        return Match() if self.prefix is None else self.prefix.match(request, request.reusable)

    def fetch(self, request: Request, blocks: Match) -> bool:
        """Whether pages for the request are on their way from host memory, for which it waits."""
        return self.moves is not None and self.moves.fetch(request, len(blocks))

    def shared(self, blocks: Match) -> list[int]:
        """Pages of each group, among those of the blocks, that some tenancy owns already."""
        return [pool.owned_of(blocks.pages(group)) for group, pool in enumerate(self.pools)]

    def admit(
        self, request: Request, wanted: Callable[[Request], Sequence[int]] | None = None
    ) -> Tenancy:
        """A tenancy of the lowest free row, with the pages that the prefix cache has for it.

        `wanted`: pages of each group that it and all others still need besides; None: no others.
        """
        blocks, start = self.match(request), 0
        if self.prefix is not None:
            self.prefix.touch(blocks)
            start = len(blocks) * self.prefix.block_size
        spans = tuple(self._shared_span(g, blocks, start) for g in range(len(self.pools)))
        tenancy = Tenancy(
            row=self.rows.allocate(1)[0],
            known=request.known,
            limit=request.limit,
            spans=spans,
            start=start,
            lower=start,
            published=len(blocks),
        )
        self._take_over(request, tenancy, wanted)
        return tenancy

    def _take_over(
        self,
        request: Request,
        tenancy: Tenancy,
        wanted: Callable[[Request], Sequence[int]] | None,
    ) -> None:
        """Where the request ends with a kept block: this too, on a page of its own.

        Its last token is computed anew, which writes that page again; others read theirs. Until its
        first letter has come, that takes a page more than computing the block does, and nobody
        else may need it.
        """
        block = None if self.prefix is None else self.prefix.ending(request, tenancy.published)
        if block is None or self.prefix is None:
            return
        self.prefix.touch_ending(block)
        for pool, pages in zip(self.pools, block.pages, strict=True):
            pool.share(pages)
        need = (0,) * len(self.pools) if wanted is None else wanted(request)
        room = all(spare > pages for spare, pages in zip(self.spare, need, strict=True))
        for group in range(len(self.pools)) if room else ():
            self.prefix.make_room(group, 1)
        if not room or not all(pool.free for pool in self.pools):
            for pool, pages in zip(self.pools, block.pages, strict=True):
                pool.release(pages, tenancy.last_round)
            return
        copies: list[PageCopy] = []
        for group, (pool, span) in enumerate(zip(self.pools, tenancy.spans, strict=True)):
            *whole, last = block.pages[group]
            (target,) = pool.allocate(1)
            span.pages += [*whole, target]
            copies.append(PageCopy(group, last, target))
        tenancy.copies, tenancy.tail = tuple(copies), block.key
        tenancy.start = tenancy.lower = request.known - 1

    def _shared_span(self, group: int, blocks: Match, start: int) -> PageSpan:
        if self.prefix is None or not blocks:
            return PageSpan()
        pool, first = self.pools[group], 0
        if pool.group.retention is None:
            pages = blocks.pages(group)
        else:
            latest = self.prefix.latest(blocks.keys[-1])
            assert latest is not None, "a match ends where a row can start"
            pages = list(latest[group])
            first = pool.group.resume_columns(start).start
        pool.share(pages)
        return PageSpan(first, pages)

    def columns(self, tenancy: Tenancy) -> tuple[PageWrite, ...]:
        """One write for each column that the row holds: for its first launch."""
        row, writes = repeat(tenancy.row), list[PageWrite]()
        for group, span in enumerate(tenancy.spans):
            columns = zip(row, repeat(group), range(span.first, span.end), span.pages, strict=False)
            writes += map(PageWrite._make, columns)
        return tuple(writes)

    def publish(self, request: Request, tenancy: Tenancy, finish: FinishReason | None) -> None:
        """Let others find what the row has computed; nothing of it, if it went wrong."""
        if self.prefix is None:
            return
        if finish is FinishReason.ERROR:
            self.prefix.forget(request, tenancy)
        else:
            self.prefix.publish(request, tenancy)
            if finish is not None:
                self.prefix.trust(request, tenancy)

    def missing(self, tenancy: Tenancy, tokens: int) -> tuple[int, ...]:
        """Pages of each group that the row lacks to hold its first `tokens` tokens."""
        found: list[int] = []
        for size, span in zip(self._page_sizes, tenancy.spans, strict=True):
            count = -(-tokens // size) - span.first - len(span.pages)
            found.append(count if count > 0 else 0)
        return tuple(found)

    def reserve(self, tenancy: Tenancy, tokens: int) -> tuple[PageWrite, ...] | None:
        """As `extend`; None, and no change, if some group is short.

        Returns one write for each new column, which must travel with the row's next launch; none
        for a row that was not launched yet, whose first launch brings all its `columns`.
        """
        writes: list[PageWrite] = []
        told = None if tenancy.last_round < 0 else writes
        return tuple(writes) if self.extend(tenancy, tokens, told) else None

    def extend(self, tenancy: Tenancy, tokens: int, writes: list[PageWrite] | None = None) -> bool:
        """Give the row pages for `tokens` tokens; False, and no change, if some group is short.

        `writes`: where to add a write for each new column; None: nowhere.
        """
        if tokens <= tenancy.room:
            return True
        missing = self.missing(tenancy, tokens)
        if not self._have(missing):
            return False
        room, row = FOREVER, tenancy.row
        for group, (count, span) in enumerate(zip(missing, tenancy.spans, strict=True)):
            end = span.first + len(span.pages)
            if count:
                pages = self.pools[group].allocate(count)
                span.pages += pages
                if writes is not None:
                    writes += [PageWrite(row, group, end + n, p) for n, p in enumerate(pages)]
            room = min(room, (end + count) * self._page_sizes[group])
        tenancy.room = room
        return True

    def _have(self, missing: Sequence[int]) -> bool:
        """So many pages of each group are free, now that what nobody reads is dropped for them."""
        short = False
        for group, (count, pool) in enumerate(zip(missing, self.pools, strict=True)):
            if count > pool.free:
                short = True
                if self.prefix is not None:
                    self.prefix.make_room(group, count)
        return not short or all(
            count <= pool.free for count, pool in zip(missing, self.pools, strict=True)
        )

    def promised(self, tenancy: Tenancy, tokens: int) -> bool:
        """Letters and copies on their way will set enough pages free to extend the row to `tokens`
        tokens."""
        missing = self.missing(tenancy, tokens)
        return all(
            count <= pool.free + pool.cached + pool.due + pool.lent
            for count, pool in zip(missing, self.pools, strict=True)
        )

    def condemn(self, tenancy: Tenancy, columns: tuple[tuple[int, ...], ...]) -> int:
        """Take the pages in these columns of the row out of use; how many were not yet."""
        condemned = 0
        for group, (pool, span) in enumerate(zip(self.pools, tenancy.spans, strict=True)):
            held = [c for c in columns[group] if span.first <= c < span.end]
            pages = [span.pages[column - span.first] for column in held]
            if tenancy.start // pool.group.page_size in held:
                pages += [copy.source for copy in tenancy.copies if copy.group == group]
            condemned += pool.condemn(pages)
            if pages and self.prefix is not None:
                self.prefix.condemn(group, pages)
        return condemned

    @property
    def loss(self) -> str:
        """For an error: which pages are out of use, if any are."""
        lost = [
            f"{pool.condemned} of {pool.total} {pool.name}" for pool in self.pools if pool.condemned
        ]
        if not lost:
            return ""
        return (
            f": {' and '.join(lost)} are out of use, quarantined since a canary found them damaged"
        )

    def settled(self, request: Request, tenancy: Tenancy) -> None:
        """A letter came, and the row goes on: let others find what it has computed, and free what
        it needs no longer. Most letters mean neither."""
        if tenancy.lower - tenancy.told_lag < tenancy.due:
            return
        self.publish(request, tenancy, None)
        self.trim(tenancy)
        due = [
            pool.group.retention + (span.first + 1) * pool.group.page_size
            for pool, span in zip(self.pools, tenancy.spans, strict=True)
            if pool.group.retention is not None
        ]
        if self.prefix is not None:
            due.append((tenancy.published + 1) * self.prefix.block_size)
        tenancy.due = min(due, default=FOREVER)

    def trim(self, tenancy: Tenancy) -> None:
        """A letter came: free the pages that lie wholly behind what later rounds may read."""
        self._let_go(tenancy)
        if not self.forgets:
            return
        for pool, span in zip(self.pools, tenancy.spans, strict=True):
            if pool.group.retention is None:
                continue
            behind = max(0, tenancy.whole - pool.group.retention) // pool.group.page_size
            count = behind - span.first
            if count > 0:
                pool.release(span.pages[:count], tenancy.last_round)
                del span.pages[:count]
                span.first = behind

    def release(self, tenancy: Tenancy) -> None:
        """End the tenancy: its row and all its pages go back."""
        tenancy.open = False
        self._let_go(tenancy)
        self.rows.release((tenancy.row,), tenancy.last_round)
        for pool, span in zip(self.pools, tenancy.spans, strict=True):
            pool.release(span.pages, tenancy.last_round)
            span.pages.clear()

    def _let_go(self, tenancy: Tenancy) -> None:
        for copy in tenancy.copies:
            self.pools[copy.group].release((copy.source,), tenancy.last_round)
        tenancy.copies = ()

    def collected(self, round_id: int) -> None:
        """The letter of round `round_id` has been read."""
        for pool in (self.rows, *self.pools):
            pool.collected(round_id)

    def check(self) -> None:
        """Raise FreewheelError unless every pool conserves."""
        for pool in (self.rows, *self.pools):
            pool.check()
        if self.moves is not None:
            self.moves.check()
