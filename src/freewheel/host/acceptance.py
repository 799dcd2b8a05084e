# SPDX-License-Identifier: Apache-2.0
"""How often drafts are right, place by place: of one request, and of all of them.

A round that writes few drafts says something of deeper ones too: a request whose first drafts fare
better than those of others is expected to do so with its next ones. So nothing is drafted only to
learn what it would be worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from freewheel.spec import MAX_DEPTH

PLACES = MAX_DEPTH + 1

FADE = 0.97
"""Of what a request showed, what is left once its draft at that place was tried once more."""

FADE_OF_ALL = 0.98
"""The same, of what all requests showed together."""

NEW = 2
"""Verified rounds of a request before its own acceptance says much."""

TRUST = 9.0
"""Trials of all requests that weigh as much as so many of a request's own."""

AT_ONCE = 4
"""Requests of which it is worked out at one time what their latest rounds say, for that takes a
host longer than all else here: those with the most of them. Others are as they were known."""

LIKE = 0.8
"""How much what is known of a request's first drafts says of its next ones, in powers of odds."""

FIRST = 0.8
"""How often a draft is right, before anything is known."""


def _places() -> list[float]:
    return [0.0] * PLACES


def _counts() -> list[int]:
    return [0] * PLACES


@dataclass(slots=True)
class Trials:
    """At each place (from 1 on): drafts before which all were right, and how many of them were
    right too; the past fades."""

    fade: float
    trials: list[float] = field(default_factory=_places)
    hits: list[float] = field(default_factory=_places)

    def add(self, ends: Sequence[int], misses: Sequence[int]) -> None:
        """Rounds, counted as those of a `_Row` are."""
        hits = 0
        for place in range(MAX_DEPTH, 0, -1):
            hits += ends[place]
            if tried := hits + misses[place]:
                left = self.fade**tried
                self.trials[place] = left * self.trials[place] + tried
                self.hits[place] = left * self.hits[place] + hits


@dataclass(slots=True)
class _Row:
    """A request: what its rounds showed and what follows; and of those that were not added yet, how
    many ended behind so many right drafts, and how many with a wrong draft at each place."""

    known: Trials = field(default_factory=lambda: Trials(FADE))
    rounds: int = 0
    fresh: int = 0
    ends: list[int] = field(default_factory=_counts)
    misses: list[int] = field(default_factory=_counts)
    tokens: list[float] = field(default_factory=list[float])


class Acceptance:
    """Of all requests under way, and of those before them.

    Counting is cheap, for it happens in every round and for every row; what follows is worked out
    when it is asked for.
    """

    def __init__(self, deepest: int) -> None:
        """`deepest`: drafts that any round writes."""
        self._places = range(1, deepest + 1)
        self._all = Trials(FADE_OF_ALL)
        self._rows: dict[str, _Row] = {}
        self._usual: list[tuple[float, float]] = []
        self._others: list[float] = []
        self._learn()

    def count(self, row: str, offered: int, agreed: int) -> None:
        """A round: of `offered` drafts of a request, the first `agreed` were right."""
        own = self._rows.get(row)
        if own is None:
            own = self._rows[row] = _Row()
        own.rounds += 1
        own.fresh += 1
        own.ends[agreed] += 1
        if agreed < offered:
            own.misses[agreed + 1] += 1

    def forget(self, row: str) -> None:
        """The request has ended; what all requests show remembers it."""
        own = self._rows.pop(row, None)
        if own is not None:
            self._all.add(own.ends, own.misses)
            self._learn()

    def new(self, row: str) -> bool:
        """Little is known of the request itself."""
        own = self._rows.get(row)
        return own is None or own.rounds < NEW

    def waits(self, rows: Sequence[str]) -> list[float]:
        """Rounds that a token takes, summed over these requests, at each depth from 0 on."""
        owners = [self._rows.get(row) for row in rows]
        fresh = [own for own in owners if own is not None and own.fresh]
        if len(fresh) > AT_ONCE:
            fresh = sorted(fresh, key=_fresh, reverse=True)[:AT_ONCE]
        if fresh:
            ends, misses = [own.ends for own in fresh], [own.misses for own in fresh]
            self._all.add(_sums(ends), _sums(misses))
            self._learn()
        for own in fresh:
            own.known.add(own.ends, own.misses)
            own.fresh, own.ends, own.misses = 0, _counts(), _counts()
            own.tokens = self._expected(own.known)
        every = [self.expected(row) for row in rows]
        if len(every) == 1:
            return [1 / tokens for tokens in every[0]]
        return [sum(1 / tokens for tokens in column) for column in zip(*every, strict=True)]

    def expected(self, row: str) -> list[float]:
        """Tokens that a round decides for a request, on average, at each depth from 0 on: as of
        when `waits` was asked for it last."""
        own = self._rows.get(row)
        return own.tokens if own is not None and own.tokens else self._others

    def _learn(self) -> None:
        """Work out what is usual: at each place how often a draft is right, and its odds."""
        rate, self._usual = FIRST, []
        for place in self._places:
            rate = (self._all.hits[place] + rate) / (self._all.trials[place] + 1)
            self._usual.append((rate, _odds(rate)))
        self._others = self._expected(None)

    def _expected(self, own: Trials | None) -> list[float]:
        tokens, right, total, better = [1.0], 1.0, 1.0, 1.0
        for place, (usual, odds) in zip(self._places, self._usual, strict=True):
            mine = usual
            if own is not None:
                here = odds * better
                mine = (own.hits[place] + TRUST * here / (1 + here)) / (own.trials[place] + TRUST)
                better = (_odds(mine) / odds) ** LIKE
            right *= mine
            total += right
            tokens.append(total)
        return tokens


def _fresh(own: _Row) -> int:
    return own.fresh


def _sums(counts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Place by place."""
    return counts[0] if len(counts) == 1 else list(map(sum, zip(*counts, strict=True)))


def _odds(probability: float) -> float:
    bounded = min(max(probability, 0.02), 0.99)
    return bounded / (1 - bounded)
