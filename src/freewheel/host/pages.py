# SPDX-License-Identifier: Apache-2.0
"""Who holds which page and which row, and how long a returned one stays untouchable."""

from __future__ import annotations

import heapq
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
        self.cached = 0
        self._free = list(range(1, size))
        self._owned: set[int] = set()
        self._quarantine: list[tuple[int, int]] = []
        self._collected = -1

    @property
    def free(self) -> int:
        """Ids that may be handed out now."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Ids handed out and not returned."""
        return len(self._owned)

    @property
    def quarantined(self) -> int:
        """Ids returned, which a round in flight may still touch."""
        return len(self._quarantine)

    def allocate(self, count: int) -> tuple[int, ...]:
        """The `count` lowest free ids. Raises FreewheelError if fewer are free: see `free`."""
        if count > self.free:
            raise FreewheelError(f"{self.name}: {count} asked for, {self.free} free")
        ids = tuple(heapq.heappop(self._free) for _ in range(count))
        self._owned.update(ids)
        return ids

    def release(self, ids: Sequence[int], until_round: int) -> None:
        """Take `ids` back; they are free once round `until_round` has been collected.

        Raises FreewheelError, and changes nothing, if one of them is not owned or comes twice.
        """
        foreign = sorted(set(ids) - self._owned)
        if foreign:
            raise FreewheelError(f"{self.name}: {foreign} released, but not owned")
        if len(set(ids)) != len(ids):
            raise FreewheelError(f"{self.name}: released twice in one call: {sorted(ids)}")
        self._owned.difference_update(ids)
        for one in ids:
            heapq.heappush(self._quarantine, (until_round, one))
        self._set_free()

    def collected(self, round_id: int) -> None:
        """Round `round_id`, and with it every earlier one, can no longer touch anything."""
        self._collected = max(self._collected, round_id)
        self._set_free()

    def check(self) -> None:
        """Raise FreewheelError unless free + cached + owned + quarantined = total, each id once."""
        held = [*self._free, *self._owned, *(one for _, one in self._quarantine)]
        if len(held) + self.cached != self.total or len(set(held)) != len(held):
            raise FreewheelError(
                f"{self.name}: free {self.free} + cached {self.cached} + owned {self.owned} + "
                f"quarantined {self.quarantined} is not {self.total} distinct ones"
            )

    def _set_free(self) -> None:
        while self._quarantine and self._quarantine[0][0] <= self._collected:
            heapq.heappush(self._free, heapq.heappop(self._quarantine)[1])


class PageAllocator(IdPool):
    """The pages of one cache group. `pages` counts scratch page 0, as the device's pool does."""

    def __init__(self, group: CacheGroup, pages: int) -> None:
        super().__init__(f"pages of {group.name}", pages)
        self.group = group


class RowAllocator(IdPool):
    """The rows of the device state. `rows` counts scratch row 0, as the device state does."""

    def __init__(self, rows: int) -> None:
        super().__init__("rows", rows)
