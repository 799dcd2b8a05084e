# SPDX-License-Identifier: Apache-2.0
"""How many drafts the next round writes: chosen from letters already read, as whole batches go.

Tokens do not depend on it, so a wrong guess costs time alone. A depth is as good as the time that a
request waits for a token with it, on average over the requests of the round: the rounds that a
token is expected to take, times what such rounds took of late. The most tokens a second would be
another goal: it favours requests whose drafts are right anyway, and leaves others to be finished in
small batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from freewheel.host.acceptance import Acceptance
from freewheel.host.costs import Costs, LoadCosts
from freewheel.spec import StepShape

TRY_SHARE = 0.005
"""Of all rounds, what trying other depths may cost."""

TRY_CREDIT = 1.0
"""Rounds that may be lost to trying before any were saved up."""

STALE = 200
"""Rounds without so many drafts after which it is doubted that they would be wrong."""

NEAR, NEARER = 0.85, 0.95
"""A depth is tried if it seems worth this part of the one in use; one whose time rounds without
rows told is tried for its time only if it seems worth the other part."""

MARGIN = 1.04
"""A depth must be this much better than the present one: less is not known so well, and to change
has its price."""

MANY = 4
"""For so many requests in a round one letter more is passed over between two that are read, on
average."""

GOLDEN = 0.5 * (5**0.5 - 1)
"""Multiples of it, taken modulo 1, fall evenly, and evenly too among those of every second or every
so-many-th: who takes part in such rounds alone is heard as often as others. Between two below 1 / n
are fewer than 5 n / 3 of them (the three-distance theorem)."""

SOON, EVERY = 4, 16
"""Rounds between two judgements of a load whose requests stay: when they came, and later. Letters
are some rounds late, and judging takes a good part of a small model's round on a fast device, the
more so the more requests there are: those of many are judged more seldom."""


@dataclass(slots=True)
class _Load:
    """Rounds that differ in depth alone: the depth in use, or the one that is tried; the rounds of
    the next judgement and of the last; the requests that ran last, from round `since` on. `credit`:
    rounds that may be lost to trying. `longer`: those that one of the depth to begin with loses.
    `used`: the last round of each depth, as of the last judgement."""

    costs: LoadCosts
    depth: int
    rounds: int = 0
    due: int = 0
    judged: int = 0
    rows: Sequence[str] = field(default_factory=list[str])
    since: int = 0
    credit: float = TRY_CREDIT
    longer: float = 0.0
    trying: int | None = None
    used: dict[int, int] = field(default_factory=dict[int, int])


class DepthPolicy:
    """Chooses among `depths`, ascending. Pure: the same calls, the same choices.

    Each request's acceptance is its own, and where little is known of it that of all requests
    (`Acceptance`). The loads (rectangles that differ in depth alone) are timed apart (`Costs`).

    What a request's drafts are worth is seen whenever it has any, and what a depth takes is known
    from rounds without rows. So little is tried: drafts for new requests, deeper ones than there
    were for long, and depths that were never timed and may well be the best. TRY_SHARE pays for it.

    A request that rounds in flight probably end has nothing to gain from another.
    """

    def __init__(self, depths: Sequence[int], start: int, settle: int) -> None:
        """`start`: the depth to begin with. `settle`: rounds of one depth before one is timed; two
        more than are in flight when another is chosen."""
        self.depths = tuple(depths)
        self._start = start
        self._try_rounds = settle + 4
        self._in_flight = settle - 2
        self._acceptance = Acceptance(self.depths[-1])
        self._costs = Costs(self.depths)
        self._loads: dict[StepShape, _Load] = {}
        self._last: tuple[StepShape, _Load] | None = None
        self._stride, self._turn = 1, 0.0
        self._heard, self._hears, self._missed = -1, True, 0
        # Tokens that requests near their end may still have, and letters passed over until then.
        self._ending: dict[str, tuple[int, int]] = {}

    def choose(self, load: StepShape, rows: Sequence[str], others: int = 0) -> int:
        """The depth of the next round of `load` (a shape of depth 0) over the requests `rows`.

        `others`: rows besides, of which the round decides one token whatever its depth.
        """
        now = self._load(load)
        now.rounds += 1
        if self._ending:
            rows = [row for row in rows if not self._ends(row, now.depth)]
        if not rows:
            return self.depths[0]
        if now.rows != rows:
            # One of many requests may wait for a judgement, for it changes little.
            now.rows, now.since, self._stride = rows, now.rounds, 1 + len(rows) // MANY
            now.due = min(now.due, now.rounds + 2 * (len(rows) - 1))
        if now.rounds >= now.due:
            self._judge(now, others)
        if now.trying is not None:
            return now.trying
        if now.depth == 0 and now.rounds - now.since < SOON and self._curious(now, others):
            now.credit -= now.longer
            return self._start
        return now.depth

    def listens(self, round_id: int) -> bool:
        """Whether the rows of the next letter, one of a round that decodes, are to be counted, and
        its round timed. All copies of a model are told the same of a round.

        Of many requests not every letter is read: each tells of all of them, and reading takes a
        host as long for every one.
        """
        if round_id != self._heard:
            self._heard, self._turn = round_id, (self._turn + GOLDEN) % 1
            self._hears = self._turn * self._stride < 1
            self._missed += not self._hears
        return self._hears

    def count(self, row: str, offered: int, agreed: int, left: int) -> None:
        """A letter: of `offered` drafts of a request, the first `agreed` were right. It may have
        `left` more tokens."""
        if offered:
            self._acceptance.count(row, offered, agreed)
        if left <= (self._in_flight + 5 * self._stride // 3) * (1 + self.depths[-1]):
            self._ending[row] = left, self._missed
        elif self._ending:
            self._ending.pop(row, None)  # of when more letters were passed over

    def forget(self, row: str) -> None:
        """The request has ended."""
        self._acceptance.forget(row)
        self._ending.pop(row, None)

    def took(self, shape: StepShape, seconds: float, host: float = 0.0) -> None:
        """What a round of `shape` took, among others like it; `host`: of that, the seconds in which
        the host worked while the device could."""
        self._costs.took(shape, seconds, host)

    def took_empty(self, shape: StepShape, seconds: float) -> None:
        """What the device took for a round of `shape` in which every row was padding."""
        self._costs.took_empty(shape, seconds)

    def _load(self, load: StepShape) -> _Load:
        if self._last is not None and self._last[0] is load:
            return self._last[1]
        now = self._loads.get(load)
        if now is None:
            now = self._loads[load] = _Load(self._costs.of(load), self._start)
        self._last = load, now
        self._stride = 1 + len(now.rows) // MANY
        return now

    def _judge(self, now: _Load, others: int) -> None:
        waits, spent = self._acceptance.waits(now.rows), now.costs.seconds()
        worth = {depth: 1 / (spent[depth] * (others + waits[depth])) for depth in self.depths}
        best = max(self.depths, key=worth.__getitem__)
        if worth[best] > MARGIN * worth[now.depth]:
            now.depth = best
        paid = TRY_SHARE * (now.rounds - now.judged)
        now.credit, now.judged = min(now.credit + paid, 2 * TRY_CREDIT), now.rounds
        lost = {  # rounds, by one of each depth
            depth: spent[depth] / spent[now.depth] * (1 - worth[depth] / worth[now.depth])
            for depth in self.depths
        }
        now.longer = max(lost[self._start], 0.0)
        many, stayed = len(now.rows), now.rounds - now.since
        now.due = now.rounds + min(max(SOON, 2 * many, stayed), EVERY * (1 + many // 4))
        self._try(now, worth, lost)

    def _try(self, now: _Load, worth: dict[int, float], lost: dict[int, float]) -> None:
        """Use a depth for some rounds that may be better than thought, if that can be paid."""
        now.trying, now.used[now.depth] = None, now.rounds
        if not now.costs.timed(now.depth):
            return
        near = {depth: worth[depth] / worth[now.depth] for depth in self.depths}
        doubted = [depth for depth in self.depths if self._doubted(now, depth, near[depth])]
        if not doubted:
            return
        tried = max(doubted, key=worth.__getitem__)
        loss = self._try_rounds * max(lost[tried], 0.02)
        if loss <= now.credit:
            now.credit -= loss
            now.trying, now.due = tried, now.rounds + self._try_rounds
            now.used[tried] = now.rounds

    def _doubted(self, now: _Load, depth: int, near: float) -> bool:
        """Whether it may be better than thought. `near`: its worth by that of the one in use."""
        if depth == now.depth:
            return False
        if not now.costs.timed(depth) and near > (
            NEAR if now.costs.empty(depth) is None else NEARER
        ):
            return True
        # Shallower drafts are seen all the time.
        stale = depth > now.depth and now.rounds - now.used.get(depth, 0) > STALE
        return stale and (near > NEAR or depth == self.depths[1])

    def _curious(self, now: _Load, others: int) -> bool:
        """Most requests are new, and a round of theirs with drafts can be paid."""
        new = sum(map(self._acceptance.new, now.rows))
        return 2 * new > len(now.rows) + others and now.longer <= now.credit

    def _ends(self, row: str, depth: int) -> bool:
        """Rounds in flight, of this depth, are expected to decide all tokens but one."""
        near = self._ending.get(row)
        if near is None:
            return False
        left, missed = near
        rounds = self._in_flight + self._missed - missed
        return left <= rounds * self._acceptance.expected(row)[depth] + 1
