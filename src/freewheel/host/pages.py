# SPDX-License-Identifier: Apache-2.0
"""Who holds which page and which row, and how long a returned one stays untouchable."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from freewheel.errors import ConfigError, FreewheelError
from freewheel.spec import CacheGroup


class IdPool:
    """Hands out the ids 1 to size - 1; id 0 is the device's scratch and is never handed out.

    Every id is free, owned or quarantined. A returned id is quarantined until the last round that
    may touch it has been collected: the device may still be writing there. The lowest free id
    goes first, so the same calls give the same ids.
    """

    def __init__(self, name: str, size: int) -> None:
        if size < 2:
            raise ConfigError(f"{name}: must be at least 2 (number 0 is scratch), got {size}")
        self.name = name
        self.total = size - 1
        self._free: list[int] = []  # a heap of returned ones
        self._fresh = 1  # this id and all above it were never handed out
        self._owned: set[int] = set()
        self._quarantine: list[tuple[int, int]] = []
        self._lost: set[int] = set()
        self._collected = -1

    @property
    def free(self) -> int:
        """Ids that may be handed out now."""
        return len(self._free) + self.total + 1 - self._fresh

    @property
    def owned(self) -> int:
        """Ids handed out and not returned."""
        return len(self._owned)

    @property
    def cached(self) -> int:
        """Ids that nobody owns, kept for what they hold."""
        return 0

    @property
    def quarantined(self) -> int:
        """Ids returned, which a round in flight may still touch or which are not to be trusted."""
        return len(self._quarantine) + len(self._lost)

    @property
    def due(self) -> int:
        """Ids that turn free when the letters of rounds in flight have come."""
        return len(self._quarantine)

    def allocate(self, count: int) -> tuple[int, ...]:
        """The `count` lowest free ids. Raises FreewheelError if fewer are free: see `free`."""
        if count > self.free:
            raise FreewheelError(f"{self.name}: {count} asked for, {self.free} free")
        returned = min(count, len(self._free))
        ids = [heapq.heappop(self._free) for _ in range(returned)]
        if returned < count:
            fresh = range(self._fresh, self._fresh + count - returned)
            self._fresh = fresh.stop
            ids += fresh
        self._owned.update(ids)
        return tuple(ids)

    def release(self, ids: Sequence[int], until_round: int) -> None:
        """Take `ids` back; they are free once round `until_round` has been collected.

        Raises FreewheelError, and changes nothing, if one of them is not owned or comes twice.
        """
        self._check_owned(ids)
        self._owned.difference_update(ids)
        for one in ids:
            heapq.heappush(self._quarantine, (until_round, one))
        if until_round <= self._collected:
            self._set_free()

    def collected(self, round_id: int) -> None:
        """Round `round_id`, and with it every earlier one, can no longer touch anything."""
        if round_id > self._collected:
            self._collected = round_id
            if self._quarantine:
                self._set_free()

    def check(self) -> None:
        """Raise FreewheelError unless free + cached + owned + quarantined = total, each id once."""
        held = [*self._free, *self._owned, *self._lost, *(one for _, one in self._quarantine)]
        untouched = self.total + 1 - self._fresh
        distinct = len(set(held)) == len(held) and max(held, default=0) < self._fresh
        if len(held) + self.cached + untouched != self.total or not distinct:
            raise FreewheelError(
                f"{self.name}: free {self.free} + cached {self.cached} + owned {self.owned} + "
                f"quarantined {self.quarantined} is not {self.total} distinct ones"
            )

    def _check_owned(self, ids: Sequence[int]) -> None:
        distinct = set(ids)
        if not distinct <= self._owned:
            foreign = sorted(distinct - self._owned)
            raise FreewheelError(f"{self.name}: {foreign} released, but not owned")
        if len(distinct) != len(ids):
            raise FreewheelError(f"{self.name}: released twice in one call: {sorted(ids)}")

    def _set_free(self) -> None:
        while self._quarantine and self._quarantine[0][0] <= self._collected:
            heapq.heappush(self._free, heapq.heappop(self._quarantine)[1])


class PageAllocator(IdPool):
    """The pages of one cache group. `pages` counts scratch page 0, as the device's pool does.

    A page may have several owners, and the prefix cache may keep it for what it holds, before and
    after its owners are gone. It turns free when no owner and no keeper is left.
    """

    def __init__(self, group: CacheGroup, pages: int) -> None:
        super().__init__(f"pages of {group.name}", pages)
        self.group = group
        self._owners: Counter[int] = Counter()
        self._keepers: Counter[int] = Counter()
        self._idle: set[int] = set()
        self._settling: set[int] = set()
        self._until: dict[int, int] = {}
        self._lent: Counter[int] = Counter()
        self._borrowed: set[int] = set()
        self._condemned: set[int] = set()

    @property
    def cached(self) -> int:
        return len(self._idle)

    @property
    def reclaimable(self) -> int:
        """Cached pages that no round in flight may touch."""
        return len(self._idle) - len(self._settling)

    @property
    def condemned(self) -> int:
        """Pages that are never handed out again, those included that somebody still holds."""
        return len(self._condemned)

    @property
    def lent(self) -> int:
        """Owned pages that only copies under way own."""
        return sum(self._owners[page] == count for page, count in self._lent.items())

    @property
    def returning(self) -> int:
        """Those of them that turn free when their copies have ended: nobody keeps them."""
        if not self._lent:
            return 0
        return sum(
            self._owners[page] == count and page not in self._keepers
            for page, count in self._lent.items()
            if page not in self._borrowed and page not in self._condemned
        )

    def collected(self, round_id: int) -> None:
        super().collected(round_id)
        if self._settling:
            self._settling = {p for p in self._settling if self._until[p] > self._collected}

    def owned_of(self, pages: Sequence[int]) -> int:
        """How many of these pages some tenancy owns."""
        return sum(map(self._owned.__contains__, pages))

    def some_idle(self, pages: Sequence[int]) -> bool:
        """Some of these pages have keepers, but no owner."""
        return not self._idle.isdisjoint(pages)

    def idle_at_end(self, pages: Sequence[int], each: int, most: int) -> int:
        """How many of the last `most` blocks of `each` of these pages, from the end on without a
        gap, have pages with keepers, but no owner."""
        idle, found = self._idle, 0
        for at in range(len(pages) - each, -1, -each):
            if found == most or idle.isdisjoint(pages[at : at + each]):
                break
            found += 1
        return found

    def allocate(self, count: int) -> tuple[int, ...]:
        pages = super().allocate(count)
        self._owners.update(pages)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for pages that are owned or kept. Raises FreewheelError for others."""
        self._check_held(pages, "shared")
        self._owners.update(pages)
        self._owned.update(pages)
        self._idle.difference_update(pages)
        self._settling.difference_update(pages)

    def lend(self, pages: Sequence[int]) -> None:
        """As `share`: the owner is a copy under way."""
        self.share(pages)
        self._lent.update(pages)

    def borrow(self, count: int) -> tuple[int, ...]:
        """As `allocate`: the owner is a copy under way, which brings what is then kept."""
        pages = self.allocate(count)
        self._lent.update(pages)
        self._borrowed.update(pages)
        return pages

    def take_back(self, pages: Sequence[int]) -> None:
        """The copy that owned these pages has ended."""
        self._lent.subtract(pages)
        self._lent = +self._lent
        self._borrowed.difference_update(pages)
        self.release(pages, -1)

    def keep(self, pages: Sequence[int]) -> None:
        """One more keeper for pages that are owned or kept. Raises FreewheelError for others."""
        self._check_held(pages, "kept")
        self._keepers.update(pages)

    def condemn(self, pages: Sequence[int]) -> int:
        """Never hand these pages, owned or kept, out again; how many of them are newly so.

        They stay in quarantine once nobody owns or keeps them.
        """
        self._check_held(pages, "condemned")
        new = set(pages) - self._condemned
        self._condemned |= new
        return len(new)

    def release(self, ids: Sequence[int], until_round: int) -> None:
        """One owner less. Raises as IdPool.release does."""
        self._check_owned(ids)
        until, owners = self._until, self._owners
        later = [page for page in ids if until.get(page, -2) < until_round]
        until.update(dict.fromkeys(later, until_round))
        left = [page for page in ids if owners[page] == 1]
        for page in ids if len(left) < len(ids) else ():
            owners[page] -= 1
        for page in left:
            del owners[page]
        self._owned.difference_update(left)
        self._retire(left)

    def drop(self, pages: Sequence[int]) -> None:
        """One keeper less. Raises FreewheelError for a page that nobody keeps."""
        keepers, owners = self._keepers, self._owners
        freed: list[int] = []
        for page in pages:
            left = keepers[page] - 1
            if left > 0:
                keepers[page] = left
                continue
            if left < 0:
                raise FreewheelError(f"{self.name}: {page} dropped, but not kept")
            del keepers[page]
            if page not in owners:
                freed.append(page)
        if freed:
            self._retire(freed)

    def check(self) -> None:
        super().check()
        if set(self._owners) != self._owned or self._idle != set(self._keepers) - self._owned:
            raise FreewheelError(f"{self.name}: counts of owners and keepers contradict the sets")

    def _retire(self, pages: Sequence[int]) -> None:
        """Nobody owns these pages: each waits for its next owner, or for its last round."""
        collected, until, keepers = self._collected, self._until, self._keepers
        kept = [page for page in pages if page in keepers]
        if kept:
            self._idle.update(kept)
            self._settling.update([page for page in kept if until[page] > collected])
            if len(kept) == len(pages):
                return
            pages = [page for page in pages if page not in keepers]
        self._idle.difference_update(pages)
        self._settling.difference_update(pages)
        if self._condemned:
            self._lost.update(self._condemned.intersection(pages))
            pages = [page for page in pages if page not in self._condemned]
        free, quarantine = self._free, self._quarantine
        for page in pages:
            last = until.pop(page)
            if last <= collected:
                heapq.heappush(free, page)
            else:
                heapq.heappush(quarantine, (last, page))

    def _check_held(self, pages: Sequence[int], what: str) -> None:
        if self._owned.issuperset(pages):
            return
        foreign = sorted([p for p in pages if p not in self._owned and p not in self._keepers])
        if foreign:
            raise FreewheelError(f"{self.name}: {foreign} {what}, but neither owned nor kept")


class RowAllocator(IdPool):
    """The rows of the device state. `rows` counts scratch row 0, as the device state does."""

    def __init__(self, rows: int) -> None:
        super().__init__("rows", rows)
