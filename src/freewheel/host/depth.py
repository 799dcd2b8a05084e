# SPDX-License-Identifier: Apache-2.0
"""How many drafts the next round writes: chosen from letters already read, as whole batches go.

Tokens do not depend on it, so a wrong guess costs time alone. A round of depth d over some rows is
worth the tokens that it is expected to decide, divided by what such rounds took of late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from freewheel.spec import MAX_DEPTH, StepShape

KEPT_TIMES = 15
"""Latest times of a shape that count."""

PROBE_SHARE = 0.005
"""Of all rounds, what trying other depths may cost."""

PROBE_CREDIT = 1.0
"""Rounds that may be lost to trying before any were saved up."""

STALE = 400
"""Rounds after which what is known of a depth is doubted."""

NEAR = 0.85
"""A depth that seems worth less than this part of the one in use is not tried for its price."""

MARGIN = 1.01
"""A depth must be this much better than the present one."""

SLOPE = 0.15
"""Of a round's time without drafts: what each draft adds, before anything was measured."""


EVERY = 4
"""Rounds between two judgements of a load whose requests stay: judging takes longer than a small
model's round on a fast device."""

NEW = 2
"""Verified rounds of a request before its own acceptance says much."""

TRUST = 6.0
"""Trials of all requests that weigh as much as so many of a request's own."""


@dataclass
class Acceptance:
    """How often the draft at each place was right, where all before it were; the past fades."""

    fade: float
    rounds: int = 0
    trials: list[float] = field(default_factory=lambda: [0.0] * (MAX_DEPTH + 1))
    hits: list[float] = field(default_factory=lambda: [0.0] * (MAX_DEPTH + 1))

    def count(self, offered: int, agreed: int) -> None:
        """A round in which so many drafts could be right, and the first `agreed` were."""
        self.rounds += 1
        for place in range(1, min(offered, agreed + 1) + 1):
            self.trials[place] = self.fade * self.trials[place] + 1
            self.hits[place] = self.fade * self.hits[place] + (place <= agreed)


@dataclass
class _Known:
    """Of one shape: its latest times, its time without rows, the round in which it last ran."""

    times: deque[float] = field(default_factory=lambda: deque[float](maxlen=KEPT_TIMES))
    empty: float | None = None
    last: int = -1


@dataclass
class _Load:
    """Rounds that differ in depth alone: the depth in use, what may be tried, what the depth to
    begin with is worth by that in use, and the requests that ran `since` rounds ago, and since."""

    depth: int
    rounds: int = 0
    credit: float = PROBE_CREDIT
    share: float = 1.0
    trying: int | None = None
    left: int = 0
    rows: tuple[str, ...] = ()
    since: int = 0


LIKE = 0.8
"""How much what is known of a request's first drafts says of its next ones, in powers of odds."""

GUESSED = 4.0
"""Rounds that weigh as much as what a depth's time without rows says of its time."""


def usual(times: Iterable[float]) -> float:
    """A third of the rounds took less: what disturbs a round only ever makes it longer."""
    ordered = sorted(times)
    return ordered[len(ordered) // 3]


def _odds(probability: float) -> float:
    bounded = min(max(probability, 0.02), 0.99)
    return bounded / (1 - bounded)


def _probability(odds: float) -> float:
    return odds / (1 + odds)


class DepthPolicy:
    """Chooses among `depths`, ascending. Pure: the same calls, the same choices.

    Each request's acceptance is its own, and where little is known of it that of all requests. The
    loads (rectangles that differ in depth alone) are learnt apart. A request's first rounds have
    drafts whatever others say, as far as PROBE_SHARE pays for them: they show what its drafts are
    worth.
    """

    def __init__(self, depths: Sequence[int], start: int, settle: int) -> None:
        """`start`: the depth to begin with. `settle`: rounds of one depth before one is timed."""
        self.depths = tuple(depths)
        self._start = start
        self._probe_rounds = settle + 4
        self._all = Acceptance(0.985)
        self._rows: dict[str, Acceptance] = {}
        self._known: dict[StepShape, _Known] = {}
        self._by_depth: dict[tuple[StepShape, int], _Known] = {}  # the same, by load and depth
        self._loads: dict[StepShape, _Load] = {}

    def choose(self, load: StepShape, rows: Sequence[str], others: int = 0) -> int:
        """The depth of the next round of `load` (a shape of depth 0) over the requests `rows`.

        `others`: rows besides, of which the round decides one token whatever its depth.
        """
        now = self._loads.setdefault(load, _Load(self._start))
        now.rounds += 1
        if now.left:
            now.left -= 1
            if not now.left:
                now.trying = None
        now.since += 1
        if now.rows != (here := tuple(rows)):
            now.rows, now.since = here, 0
        judged = now.since < EVERY or now.since % EVERY == 0
        if judged and now.trying is None:
            self._decide(load, now, rows, others)
        depth = now.depth if now.trying is None else now.trying
        new = depth == 0 and now.since < EVERY
        if new and 2 * sum(map(self._new, rows)) > len(rows) + others:
            longer = self._seconds(load, self._start) / self._seconds(load, now.depth)
            loss = longer * (1 - now.share)
            if loss <= now.credit:
                now.credit -= max(loss, 0.0)
                depth = self._start
        if judged:
            self._of(load, depth).last = now.rounds
        return depth

    def count(self, row: str, offered: int, agreed: int) -> None:
        """A letter: of `offered` drafts of a request, the first `agreed` were right."""
        if offered:
            self._all.count(offered, agreed)
            self._rows.setdefault(row, Acceptance(0.97)).count(offered, agreed)

    def took(self, shape: StepShape, seconds: float) -> None:
        """What a round of `shape` took, among others like it."""
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = _Known()
        known.times.append(seconds)

    def took_empty(self, shape: StepShape, seconds: float) -> None:
        """What a round of `shape` took in which every row was padding: a first guess."""
        self._of(replace(shape, width=1, depth=0), shape.depth).empty = seconds

    def forget(self, row: str) -> None:
        """The request has ended."""
        self._rows.pop(row, None)

    def expected(self, rows: Sequence[str], depth: int) -> float:
        """Tokens that a round of `depth` decides for these requests, on average."""
        return sum(self._tokens(row)[depth] for row in rows)

    def _decide(self, load: StepShape, now: _Load, rows: Sequence[str], others: int) -> None:
        gains = [self._tokens(row) for row in rows]
        tokens = {depth: others + sum(gain[depth] for gain in gains) for depth in self.depths}
        times = self._times(load)
        spent = {depth: self._seconds(load, depth, times) for depth in self.depths}
        worth = {depth: tokens[depth] / spent[depth] for depth in self.depths}
        best = max(self.depths, key=lambda depth: worth[depth])
        if worth[best] > MARGIN * worth[now.depth]:
            now.depth = best
        rounds = 1 if now.since < EVERY else EVERY
        now.credit = min(now.credit + PROBE_SHARE * rounds, 2 * PROBE_CREDIT)
        share = {depth: worth[depth] / worth[now.depth] for depth in self.depths}
        now.share = share[self._start]
        doubted = [d for d in self.depths if self._doubted(load, now, d, share[d])]
        if not doubted or not self._of(load, now.depth).times:
            return
        tried = max(doubted, key=lambda depth: worth[depth])
        longer = spent[tried] / spent[now.depth]
        loss = self._probe_rounds * longer * max(1 - share[tried], 0.02)
        if loss <= now.credit:
            now.credit -= loss
            now.trying, now.left = tried, self._probe_rounds

    def _doubted(self, load: StepShape, now: _Load, depth: int, share: float) -> bool:
        """Whether it may be better than thought. `share`: its worth by that of the one in use."""
        known = self._of(load, depth)
        if depth == now.depth:
            return False
        if not known.times and known.empty is None:
            return share > NEAR
        # Shallower drafts are seen all the time.
        return (
            depth > now.depth
            and now.rounds - max(known.last, 0) > STALE
            and (share > NEAR or depth == min(d for d in self.depths if d > 0))
        )

    def _tokens(self, row: str) -> list[float]:
        """Tokens that a round decides of one request, for each depth from 0 on."""
        own, everyone = self._rows.get(row), self._all
        tokens, right, rate, better = [1.0], 1.0, 0.8, 1.0
        for place in range(1, MAX_DEPTH + 1):
            if everyone.trials[place] > 0:
                rate = (everyone.hits[place] + rate) / (everyone.trials[place] + 1)
            mine = _probability(_odds(rate) * better)
            if own is not None:
                mine = (own.hits[place] + TRUST * mine) / (own.trials[place] + TRUST)
                better = (_odds(mine) / _odds(rate)) ** LIKE
            right *= mine
            tokens.append(tokens[-1] + right)
        return tokens

    def _times(self, load: StepShape) -> dict[int, float]:
        """Of each depth that was timed, what a round takes."""
        return {d: usual(k.times) for d in self.depths if (k := self._of(load, d)).times}

    def _seconds(self, load: StepShape, depth: int, times: dict[int, float] | None = None) -> float:
        """What a round of this depth takes: as measured, or between and beyond what was."""
        times = self._times(load) if times is None else times
        guess = self._guess(load, depth, times)
        if guess is not None:
            count = len(self._of(load, depth).times)
            return (count * times.get(depth, 0.0) + GUESSED * guess) / (count + GUESSED)
        if depth in times:
            return times[depth]
        if not times:
            return self._of(load, depth).empty or 1 + SLOPE * depth
        near = sorted(times, key=lambda d: abs(d - depth))[:2]
        if len(near) == 1:
            return times[near[0]] * (1 + SLOPE * depth) / (1 + SLOPE * near[0])
        low, high = sorted(near)
        slope = max((times[high] - times[low]) / (high - low), 0.0)
        return max(times[low] + slope * (depth - low), 0.5 * min(times.values()))

    def _guess(self, load: StepShape, depth: int, times: dict[int, float]) -> float | None:
        """Its time without rows, by as much longer as rounds of other depths are than theirs."""
        wanted, known = self._of(load, depth).empty, {d: self._of(load, d) for d in times}
        longer = [
            (len(of.times), times[d] / of.empty) for d, of in known.items() if of.empty is not None
        ]
        if wanted is None or not longer:
            return None
        return wanted * sum(n * ratio for n, ratio in longer) / sum(n for n, _ in longer)

    def _new(self, row: str) -> bool:
        own = self._rows.get(row)
        return own is None or own.rounds < NEW

    def _of(self, load: StepShape, depth: int) -> _Known:
        found = self._by_depth.get((load, depth))
        if found is None:
            shape = replace(load, width=1 + depth, depth=depth)
            found = self._known.setdefault(shape, _Known())
            self._by_depth[load, depth] = found
        return found


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
