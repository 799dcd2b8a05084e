# SPDX-License-Identifier: Apache-2.0
"""What rounds take: as measured of late, and where they were not, by their time without rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from freewheel.spec import StepShape

KEPT_TIMES = 15
"""Latest times of a shape that count."""

SLOPE = 0.15
"""Of a round's time without drafts: what each draft adds, before anything was measured."""

GUESSED = 2.0
"""Rounds that weigh as much as what a depth's time without rows says of its time."""


@dataclass(slots=True)
class Known:
    """Of one shape: its latest times, what is usual of them, and its time without rows."""

    times: deque[float] = field(default_factory=lambda: deque[float](maxlen=KEPT_TIMES))
    fresh: bool = False
    usual: float = 0.0
    empty: float | None = None

    def add(self, seconds: float) -> None:
        self.times.append(seconds)
        self.fresh = True

    @property
    def seconds(self) -> float | None:
        """A third of the rounds took less: what disturbs a round only ever makes it longer."""
        if self.fresh:
            self.usual, self.fresh = sorted(self.times)[len(self.times) // 3], False
        return self.usual if self.times else None


class Costs:
    """Of rounds by their shape. A load (a shape of depth 0) is what rounds have in common that
    differ in depth alone; loads are learnt apart."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = tuple(depths)
        self._known: dict[StepShape, Known] = {}

    def took(self, shape: StepShape, seconds: float) -> None:
        """What a round of `shape` took, among others like it."""
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = Known()
        known.add(seconds)

    def took_empty(self, shape: StepShape, seconds: float) -> None:
        """What a round of `shape` took in which every row was padding: a first guess."""
        self._known.setdefault(shape, Known()).empty = seconds

    def of(self, load: StepShape) -> LoadCosts:
        """Of the rounds of a load, now and later."""
        choosing = replace(load, extras=0, guided=False)
        return LoadCosts(self._depths, self._by_depth(load), self._by_depth(choosing))

    def _by_depth(self, load: StepShape) -> dict[int, Known]:
        shapes = {depth: replace(load, width=1 + depth, depth=depth) for depth in self._depths}
        return {depth: self._known.setdefault(one, Known()) for depth, one in shapes.items()}


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Of one load, by depth. `choosing`: of the load whose rounds do nothing but choose."""

    depths: tuple[int, ...]
    known: dict[int, Known]
    choosing: dict[int, Known]

    def timed(self, depth: int) -> bool:
        """Such rounds were measured."""
        return bool(self.known[depth].times)

    def empty(self, depth: int) -> float | None:
        """What such rounds take without rows; of those that only choose if they alone told."""
        empty = self.known[depth].empty
        return self.choosing[depth].empty if empty is None else empty

    def seconds(self) -> dict[int, float]:
        """What a round takes at each depth: as measured, or between and beyond what was."""
        times = {d: t for d, one in self.known.items() if (t := one.seconds) is not None}
        longer = self._longer(times)
        return {depth: self._seconds(depth, times, longer) for depth in self.depths}

    def _longer(self, times: dict[int, float]) -> float | None:
        """By how much rounds take longer than without rows."""
        weight = total = 0.0
        for depth, seconds in times.items():
            if (empty := self.empty(depth)) is not None:
                count = len(self.known[depth].times)
                weight += count
                total += count * seconds / empty
        return total / weight if weight else None

    def _seconds(self, depth: int, times: dict[int, float], longer: float | None) -> float:
        empty = self.empty(depth)
        if empty is not None and (longer is not None or not times):
            guess = empty * (1.0 if longer is None else longer)
            count = len(self.known[depth].times)
            return (count * times.get(depth, 0.0) + GUESSED * guess) / (count + GUESSED)
        return times[depth] if depth in times else _beyond(depth, times)


def _beyond(depth: int, times: dict[int, float]) -> float:
    """By what rounds of other depths take."""
    if not times:
        return 1 + SLOPE * depth
    near = sorted(times, key=lambda d: abs(d - depth))[:2]
    if len(near) == 1:
        return times[near[0]] * (1 + SLOPE * depth) / (1 + SLOPE * near[0])
    low, high = sorted(near)
    slope = max((times[high] - times[low]) / (high - low), 0.0)
    return max(times[low] + slope * (depth - low), 0.5 * min(times.values()))


class Pace:
    """What a round takes, from when letters arrive: of rounds among others of their shape.

    Whether rounds overlap with the host or not, in a row of like rounds letters are as far apart as
    rounds are.
    """

    def __init__(self) -> None:
        self._shape: StepShape | None = None
        self._arrived: float | None = None

    def letter(
        self, shape: StepShape, in_flight: Iterable[StepShape], now: float | None
    ) -> float | None:
        """Seconds since the letter before, if that, this one and all in flight are of one shape."""
        alike = shape == self._shape and all(one == shape for one in in_flight)
        before, self._shape, self._arrived = self._arrived, shape, now
        return now - before if alike and before is not None and now is not None else None
