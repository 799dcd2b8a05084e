# SPDX-License-Identifier: Apache-2.0
"""When whom to look at: counted in letters that were read."""

from __future__ import annotations

from heapq import heappop, heappush

from freewheel.simulate.lanes import NEVER, Lane

Heap = list[tuple[int, int, Lane]]
"""How many letters are read, the order of entry, and to whom that matters."""


class Watch:
    """Lanes by their `safe` and `due`; entries that a lane no longer means are passed over."""

    def __init__(self) -> None:
        self._checks: Heap = []
        self._dues: Heap = []
        self._entries = 0

    @property
    def next_check(self) -> int:
        """With so many letters read at most, rounds can be launched without a look at anybody."""
        return self._checks[0][0] if self._checks else NEVER

    @property
    def next_due(self) -> int:
        """When so many letters are read, they may mean something to somebody."""
        return self._dues[0][0] if self._dues else NEVER

    def enter(self, lane: Lane) -> None:
        """To be looked at as it says now."""
        self._entries += 1
        if lane.end == NEVER:
            heappush(self._checks, (lane.safe, self._entries, lane))
        if lane.due <= lane.end:
            heappush(self._dues, (lane.due, self._entries, lane))

    def checks(self, most: int) -> list[Lane]:
        """Those that go on and are safe with so many letters at most; no longer watched for it."""
        found = _popped(self._checks, most)
        return list(dict.fromkeys([n for at, n in found if n.safe == at and n.end == NEVER]))

    def dues(self, read: int) -> list[Lane]:
        """Those to whom a letter up to this one means something; no longer watched for it."""
        found = _popped(self._dues, read)
        return list(dict.fromkeys([lane for at, lane in found if lane.due == at]))


def _popped(heap: Heap, most: int) -> list[tuple[int, Lane]]:
    """What stands in it up to `most`, which is taken out."""
    found: list[tuple[int, Lane]] = []
    while heap and heap[0][0] <= most:
        at, _, lane = heappop(heap)
        found.append((at, lane))
    return found
