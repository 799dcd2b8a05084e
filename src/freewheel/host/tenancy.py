# SPDX-License-Identifier: Apache-2.0
"""One stay of a request in a row, and what rounds in flight may have done to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from freewheel.errors import FreewheelError
from freewheel.spec import PageCopy

NOT_KNOWN = -(1 << 62)
"""Before any number of tokens."""


@dataclass(slots=True)
class PageSpan:
    """The columns of one group's page table that a row holds: `pages[i]` is in `first + i`."""

    first: int = 0
    pages: list[int] = field(default_factory=list[int])

    @property
    def end(self) -> int:
        """The first column not written yet."""
        return self.first + len(self.pages)


@dataclass(eq=False, slots=True)
class Tenancy:
    """A request's stay in a row, from its admission to its finish, abort or preemption.

    Letters are matched to the tenancy that was launched, never to a row number: the row may have
    a new tenant by the time a letter arrives.

    `known`: tokens certain at admission. `limit`: tokens at which the row finishes. `start`: tokens
    whose pages it was given at admission. `published`: blocks of its tokens that were in the
    prefix cache when it last looked. `lower`: the
    row's `computed` as of the last letter. `pending`: the most tokens by which rounds in flight
    may advance it. `owed`: rounds in flight which emit at least one token each, unless the row
    has finished. `last_round`: the last round launched with this row; -1 before the first.
    `drafts`: the depth of that round. `lag`: the most positions that the drafter has not read once
    all rounds launched have run: the latest ones. `lags`: the same behind each round in flight;
    `told_lag`: as of the last letter, if drafters may lag at all. `room`: tokens for which every
    group has pages. `due`: whole tokens from which on some block is to be kept, or some page to be
    freed: an earlier letter means nothing to pages. `copies`: pages that it begins with as others
    left them, but for the last token of each; their sources are its own too until its first letter
    has come. `tail`: the key of the block that those are of.
    """

    row: int
    known: int
    limit: int
    spans: tuple[PageSpan, ...]
    start: int = 0
    lower: int = 0
    pending: int = 0
    owed: int = 0
    last_round: int = -1
    drafts: int = 0
    lag: int = 0
    lags: deque[int] = field(default_factory=deque[int])
    told_lag: int = 0
    published: int = 0
    room: int = 0
    due: int = NOT_KNOWN
    open: bool = True
    copies: tuple[PageCopy, ...] = ()
    tail: bytes = b""

    @property
    def upper(self) -> int:
        """The most that `computed` can be once every round in flight has run.

        Exact until the prompt's last chunk is launched. A row that holds `limit` tokens has
        computed all but the last of them, and stays there.
        """
        upper, last = self.lower + self.pending, self.limit - 1
        return upper if upper < last else last

    @property
    def prefilling(self) -> bool:
        """Some token certain at admission has not been launched yet."""
        return self.upper < self.known

    @property
    def whole(self) -> int:
        """Tokens whose every cache row, the drafter's included, is stored for certain."""
        return max(0, self.lower - self.told_lag)

    def launch(
        self, round_id: int, advance: int, emits: bool, drafts: int = 0, lag: int | None = None
    ) -> None:
        """A round of depth `drafts` that advances it by at most `advance` tokens is on its way.

        `lag`: None where drafters never lag.
        """
        self.last_round, self.drafts = round_id, drafts
        if lag is not None:
            self.lag = lag
            self.lags.append(lag)
        self.pending += advance
        self.owed += emits

    def settle(self, computed: int, advance: int, emits: bool) -> None:
        """The letter of such a round says `computed`. Raises FreewheelError if it cannot be."""
        if not self.lower <= computed <= self.lower + advance:
            raise FreewheelError(
                f"row {self.row} reports {computed} computed tokens; expected {self.lower} to "
                f"{self.lower + advance}"
            )
        self.lower = computed
        if self.lags:
            self.told_lag = self.lags.popleft()
        self.pending -= advance
        self.owed -= emits
