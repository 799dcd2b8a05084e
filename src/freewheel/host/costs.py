# SPDX-License-Identifier: Apache-2.0
"""What rounds take: the device's part at each depth, and the host's, which is the same at all.

With rounds in flight the two work side by side, and a round takes as long as the slower of them.
What the host takes changes with what else its processor has to do, so it is followed at whatever
depth is in use; what the device takes is known from rounds without rows, as far as it was not seen.
"""

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

LEAST = 1e-9
"""Seconds that anything takes, also by a clock that is too coarse to see it."""

BUSY = 0.85
"""Of a round's time, what the host may work for if the device is to be the slower one."""

TOGETHER = 8
"""Where both take about as long, each now and then waits for the other: the norm of the two of this
order is what such a round takes."""


@dataclass(slots=True)
class Latest:
    """The latest times of something, and what is usual of them."""

    times: deque[float] = field(default_factory=lambda: deque[float](maxlen=KEPT_TIMES))
    fresh: bool = False
    last: float = 0.0

    def add(self, seconds: float) -> None:
        self.times.append(seconds)
        self.fresh = True

    @property
    def usual(self) -> float | None:
        """A third of the rounds took less: what disturbs a round only ever makes it longer."""
        if self.fresh:
            self.last, self.fresh = sorted(self.times)[len(self.times) // 3], False
        return self.last if self.times else None


@dataclass(slots=True)
class Known:
    """Of one shape: what the device took where it was the slower, what the host takes for all of
    its load, whether any round was timed, and its time without rows."""

    device: Latest = field(default_factory=Latest)
    host: Latest | None = None
    timed: bool = False
    empty: float | None = None


class Costs:
    """Of rounds by their shape. A load (a shape of depth 0) is what rounds have in common that
    differ in depth alone; loads are learnt apart."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = tuple(depths)
        self._known: dict[StepShape, Known] = {}
        self._hosts: dict[StepShape, Latest] = {}
        self._latest = Latest()

    def took(self, shape: StepShape, seconds: float, host: float) -> None:
        """What a round of `shape` took, among others like it; `host`: of that, the seconds in which
        the host worked while the device could."""
        seconds = max(seconds, LEAST)
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = Known()
        known.timed = True
        if host < BUSY * seconds or known.empty is None:
            known.device.add(seconds)
        if known.host is None:
            known.host = self._host(replace(shape, width=1, depth=0))
        self._latest = known.host
        self._latest.add(host)

    def took_empty(self, shape: StepShape, seconds: float) -> None:
        """What the device took for a round of `shape` in which every row was padding."""
        self._known.setdefault(shape, Known()).empty = max(seconds, LEAST)

    def of(self, load: StepShape) -> LoadCosts:
        """Of the rounds of a load, now and later."""
        choosing = replace(load, extras=0, guided=False)
        known, host = self._by_depth(load), self._host(load)
        return LoadCosts(self._depths, known, self._by_depth(choosing), host)

    def _host(self, load: StepShape) -> Latest:
        found = self._hosts.get(load)
        if found is None:
            found = self._hosts[load] = Latest()
            if (like := self._latest.usual) is not None:
                found.add(like)  # as other rounds of late
        return found

    def _by_depth(self, load: StepShape) -> dict[int, Known]:
        shapes = {depth: replace(load, width=1 + depth, depth=depth) for depth in self._depths}
        return {depth: self._known.setdefault(one, Known()) for depth, one in shapes.items()}


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Of one load, by depth. `choosing`: of the load whose rounds do nothing but choose. `host`:
    what the host takes for a round."""

    depths: tuple[int, ...]
    known: dict[int, Known]
    choosing: dict[int, Known]
    host: Latest

    def timed(self, depth: int) -> bool:
        """Such rounds were measured."""
        return self.known[depth].timed

    def empty(self, depth: int) -> float | None:
        """What such rounds take without rows; of those that only choose if they alone told."""
        empty = self.known[depth].empty
        return self.choosing[depth].empty if empty is None else empty

    def seconds(self) -> dict[int, float]:
        """What a round takes at each depth: as measured, or between and beyond what was."""
        times = {d: t for d, one in self.known.items() if (t := one.device.usual) is not None}
        longer, host = self._longer(times), self.host.usual or 0.0
        return {d: _side_by_side(self._device(d, times, longer), host) for d in self.depths}

    def _longer(self, times: dict[int, float]) -> float:
        """By how much rounds take the device longer than without rows."""
        weight = total = GUESSED
        for depth, seconds in times.items():
            if (empty := self.empty(depth)) is not None:
                count = len(self.known[depth].device.times)
                weight += count
                total += count * seconds / empty
        return total / weight

    def _device(self, depth: int, times: dict[int, float], longer: float) -> float:
        empty, count = self.empty(depth), len(self.known[depth].device.times)
        if empty is not None:
            return (count * times.get(depth, 0.0) + GUESSED * empty * longer) / (count + GUESSED)
        return times[depth] if depth in times else _beyond(depth, times)


def _side_by_side(device: float, host: float) -> float:
    slower, faster = max(device, host), min(device, host)
    return slower * (1 + (faster / slower) ** TOGETHER) ** (1 / TOGETHER)


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


@dataclass(frozen=True, slots=True)
class Arrived:
    """When a letter was here, in seconds; `host`: those in which the host worked since the letter
    before, beside rounds in flight."""

    seconds: float
    host: float = 0.0


class Pace:
    """What a round takes, from when letters arrive: of rounds among others of their shape.

    Whether rounds overlap with the host or not, in a row of like rounds letters are as far apart as
    rounds are.
    """

    def __init__(self) -> None:
        self._shape: StepShape | None = None
        self._arrived: float | None = None

    def letter(
        self, shape: StepShape, in_flight: Iterable[StepShape], at: Arrived | None
    ) -> tuple[float, float] | None:
        """Seconds since the letter before, if that, this one and all in flight are of one shape;
        and of those, the host's."""
        alike = shape == self._shape and all(one is shape or one == shape for one in in_flight)
        before, self._shape = self._arrived, shape
        self._arrived = None if at is None else at.seconds
        if not alike or before is None or at is None:
            return None
        return at.seconds - before, at.host
