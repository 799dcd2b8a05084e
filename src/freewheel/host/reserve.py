# SPDX-License-Identifier: Apache-2.0
"""Pages and rows of running requests: reserved ahead, freed behind, released in one place."""

from __future__ import annotations

from freewheel.host.pages import PageAllocator, RowAllocator
from freewheel.host.tenancy import PageSpan, Tenancy
from freewheel.spec import CacheGroup, PageWrite


class Reservations:
    """The row pool and one page pool for each cache group.

    Whatever a tenancy gives back is quarantined until the last round launched with it has been
    collected. `finish`, abort and preemption all go through `release`.
    """

    def __init__(
        self, groups: tuple[CacheGroup, ...], group_pages: tuple[int, ...], rows: int
    ) -> None:
        self.pools = tuple(
            PageAllocator(group, pages) for group, pages in zip(groups, group_pages, strict=True)
        )
        self.rows = RowAllocator(rows)

    def admit(self, known: int, limit: int) -> Tenancy:
        """A tenancy of the lowest free row, still without pages."""
        spans = tuple(PageSpan() for _ in self.pools)
        return Tenancy(row=self.rows.allocate(1)[0], known=known, limit=limit, spans=spans)

    def missing(self, tenancy: Tenancy, tokens: int) -> tuple[int, ...]:
        """Pages of each group that the row lacks to hold its first `tokens` tokens."""
        return tuple(
            max(0, pool.group.pages_for(tokens) - span.end)
            for pool, span in zip(self.pools, tenancy.spans, strict=True)
        )

    def reserve(self, tenancy: Tenancy, tokens: int) -> tuple[PageWrite, ...] | None:
        """Extend the row to `tokens` tokens; None, and no change, if some group is short.

        Returns one write for each new column. They must travel with the row's next launch.
        """
        missing = self.missing(tenancy, tokens)
        if any(count > pool.free for count, pool in zip(missing, self.pools, strict=True)):
            return None
        writes: list[PageWrite] = []
        for group, (pool, span) in enumerate(zip(self.pools, tenancy.spans, strict=True)):
            for page in pool.allocate(missing[group]):
                writes.append(PageWrite(tenancy.row, group, span.end, page))
                span.pages.append(page)
        return tuple(writes)

    def promised(self, tenancy: Tenancy, tokens: int) -> bool:
        """Letters on their way will set enough pages free to extend the row to `tokens` tokens."""
        missing = self.missing(tenancy, tokens)
        return all(
            count <= pool.free + pool.quarantined
            for count, pool in zip(missing, self.pools, strict=True)
        )

    def trim(self, tenancy: Tenancy) -> None:
        """Free the pages that lie wholly behind what later rounds may read."""
        for pool, span in zip(self.pools, tenancy.spans, strict=True):
            if pool.group.retention is None:
                continue
            behind = max(0, tenancy.lower - pool.group.retention) // pool.group.page_size
            count = behind - span.first
            if count > 0:
                pool.release(span.pages[:count], tenancy.last_round)
                del span.pages[:count]
                span.first = behind

    def release(self, tenancy: Tenancy) -> None:
        """End the tenancy: its row and all its pages go back."""
        tenancy.open = False
        self.rows.release((tenancy.row,), tenancy.last_round)
        for pool, span in zip(self.pools, tenancy.spans, strict=True):
            pool.release(span.pages, tenancy.last_round)
            span.pages.clear()

    def collected(self, round_id: int) -> None:
        """The letter of round `round_id` has been read."""
        for pool in (self.rows, *self.pools):
            pool.collected(round_id)

    def check(self) -> None:
        """Raise FreewheelError unless every pool conserves."""
        for pool in (self.rows, *self.pools):
            pool.check()
