# SPDX-License-Identifier: Apache-2.0
"""Rows that decode, and how far they are after any number of rounds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from freewheel.host import Request
from freewheel.host.tenancy import Tenancy
from freewheel.simulate.device import Row
from freewheel.simulate.luck import LOTS, Luck

NEVER = 1 << 62
MARGIN = 64
"""Rounds that may be looked at beyond where one was searched for: more than are ever in flight."""

LAST = 2 * LOTS - MARGIN


@dataclass(slots=True, eq=False)
class Lane:
    """A row that takes part in every round that nobody plans, from round `begin` to `end`.

    Such rounds are counted from the beginning of the replay; round n draws lot `shift` + n. When n
    have run, the row has `base` + sums[`shift` + n] tokens, or `limit`.

    `launched`, `read`: rounds, and letters of them, of which the tenancy knows; `told`: tokens of
    which the request does. With no more than `safe` letters read, a round can be launched without a
    look at the row; with no more than `stays`, it takes part in the next one if pages suffice. When
    `due` letters are read, its request has ended, or pages are to be kept or freed; when `ends`
    are, it has ended, or so much lies ahead that this was not looked for. `before`: the same row's
    earlier rounds, whose letters come first.
    """

    request: Request
    tenancy: Tenancy
    row: Row
    sums: Sequence[int]
    shift: int
    base: int
    limit: int
    begin: int
    launched: int
    read: int
    told: int
    end: int = NEVER
    safe: int = -1
    due: int = NEVER
    stays: int = -1
    before: Lane | None = None
    ends: int = NEVER

    @classmethod
    def of(cls, request: Request, tenancy: Tenancy, row: Row, luck: Luck, begin: int) -> Lane:
        """From round `begin` on; the device has run all rounds before it."""
        base, known = row.known - luck.sums[row.lot], row.known
        return cls(
            request,
            tenancy,
            row,
            luck.sums,
            shift=row.lot - begin,
            base=base,
            limit=row.limit,
            begin=begin,
            launched=begin,
            read=begin,
            told=known,
        )

    def own(self, rounds: int) -> int:
        """Up to this one of its own, if so many have been counted."""
        return min(max(rounds, self.begin), self.end)

    def known(self, rounds: int) -> int:
        """Tokens behind so many of its rounds."""
        return min(self.limit, self.base + self.sums[self.shift + rounds])

    def stop(self, rounds: int) -> None:
        """It takes part in no more than have been counted now, and the device's row is there."""
        self.end = rounds
        self.row.known = self.known(rounds)
        self.row.computed = self.row.known - 1
        self.row.lot = (self.shift + rounds) % LOTS

    def turn_over(self) -> None:
        """Count its lots from the beginning of the deck again, if its letters are a deck behind."""
        if self.shift + self.read >= LOTS:
            self.shift -= LOTS
            self.base += self.sums[LOTS]

    def last_within(self, tokens: int) -> int:
        """The last number of rounds behind which it has at most so many; if they are many, an
        earlier one."""
        return bisect_right(self.sums, tokens - self.base, 0, LAST) - 1 - self.shift

    def first_with(self, tokens: int) -> int:
        """The first number of rounds behind which it has so many; if they are many, an earlier
        one."""
        return bisect_left(self.sums, tokens - self.base, 0, LAST) - self.shift

    def lengths(self, rounds: int, count: int) -> Sequence[int]:
        """`base` less than its tokens behind each of `count` rounds after so many."""
        first = self.shift + rounds + 1
        found = self.sums[first : first + count]
        most = self.limit - self.base
        return found if found[-1] <= most else [min(one, most) for one in found]
