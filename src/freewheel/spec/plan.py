# SPDX-License-Identifier: Apache-2.0
"""The two letters of a round: what the host asks for, and what the device answers. Ints only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from freewheel.spec.adjustments import Adjustments
from freewheel.spec.cache import CacheGroup
from freewheel.spec.sampling import FinishReason
from freewheel.spec.shape import MAX_VERIFY_WIDTH, StepShape
from freewheel.spec.violation import Violation


@dataclass(frozen=True)
class Admission:
    """A request takes over a row: every per-row value of the device state is set from here.

    Lengths are absolute positions in the row: `known` tokens are certain, the first `computed` of
    them have their cache rows stored, the row finishes when it holds `limit` tokens, and stop ids
    are masked until it holds `minimum`. `adjustments` need a shape that adjusts.
    """

    known: int
    computed: int
    limit: int
    minimum: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_ids: tuple[int, ...]
    adjustments: Adjustments | None = None


@dataclass(frozen=True)
class Feed:
    """Certain tokens to write into a row, from absolute position `start` on."""

    start: int
    tokens: Sequence[int]


class PageWrite(NamedTuple):
    """`page_tables[group, row, column] = page`."""

    row: int
    group: int
    column: int
    page: int


@dataclass(frozen=True)
class PageCopy:
    """Page `target` of the group is to hold what page `source` holds, before the round begins."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class TableWrite:
    """int16 `cells`, as bytes, for the device's tables from cell `start` on."""

    start: int
    cells: bytes


@dataclass(frozen=True)
class MaskWrite:
    """Which tokens may stand at position `length` of a row: int32 words, as bytes, a bit each."""

    length: int
    bits: bytes


@dataclass(frozen=True)
class StepPlan:
    """One round. `rows`, `admissions` and `feeds` run in parallel; at most `shape.batch` long.

    A feed brings the rectangle's own tokens and the one behind it, which the drafter reads at a
    chunk's last position; a row's first feed also those before the rectangle, whose pages were
    found. See `feed_bound`. Only rounds of shape TABLES bring a `table`; only guided ones bring
    `masks`, one or None for each row. `copies`: for rows that begin within a page of others, which
    they take over but for its last token. `others`: what the other copies of the model do in the
    same round, of the same shape; those that are not named idle.
    """

    round_id: int
    shape: StepShape
    rows: tuple[int, ...]
    admissions: tuple[Admission | None, ...]
    feeds: tuple[Feed | None, ...]
    page_writes: tuple[PageWrite, ...]
    table: TableWrite | None = None
    masks: tuple[MaskWrite | None, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    others: tuple[StepPlan, ...] = ()

    @property
    def each(self) -> tuple[StepPlan, ...]:
        """What each copy of the model does, in their order."""
        return (self, *self.others)

    def alike(self, copies: int) -> StepPlan:
        """The round in which `copies` copies all do this."""
        return replace(self, others=(self,) * (copies - 1))


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of a token by the model's own logits, and of the likeliest tokens there.

    `top`: (token id, log-probability), MAX_LOGPROBS of them, likeliest first, the lower id first
    among equals.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RowResult:
    """What a round did to one row. Not frozen: one is made for every row and round.

    `tokens`: newly certain, in order. `computed`: the row's new computed length. `drafted`: drafts
    verified; `agreed`: how many of `tokens`, from the first on, had been drafted. `scores`: of each
    of `tokens`, in rounds that report. `echo`: in rounds that echo, of the token behind each of the
    rectangle's positions (one that is not certain yet scores as token 0). `picks`: in rounds that
    show them, the keys that the last certain token picks in each layer that does, ascending.
    `violation`: what a canary found, for which the round passed the row by; the rest says nothing.
    """

    row: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    computed: int
    drafted: int
    agreed: int
    scores: tuple[TokenScore, ...] = ()
    echo: tuple[TokenScore, ...] = ()
    picks: tuple[tuple[int, ...], ...] = ()
    violation: Violation | None = None


@dataclass(frozen=True)
class StepResult:
    """The letter home of round `round_id`, one entry for each of the plan's rows, in order.

    `others`: those of the other copies of the model.
    """

    round_id: int
    rows: tuple[RowResult, ...]
    others: tuple[StepResult, ...] = ()

    @property
    def each(self) -> tuple[StepResult, ...]:
        """What came of each copy of the model, in their order."""
        return (self, *self.others)


def feed_bound(shape: StepShape, row_width: int) -> int:
    """The most tokens that one feed of such a plan brings: the inbox needs this room.

    The first round of a prompt may bring a whole row of `row_width` tokens.
    """
    return row_width if shape.for_prompts else min(shape.width + 1, row_width)


def page_writes_bound(shape: StepShape, groups: tuple[CacheGroup, ...], row_width: int) -> int:
    """The most page-table entries that a plan of this shape writes: the inbox needs this room.

    From one launch of a row to the next its reserved length grows by at most the width of the
    round before, which may have been deeper; a prompt's first round may find pages for the whole
    row.
    """
    tokens = row_width if shape.for_prompts else max(shape.reach, MAX_VERIFY_WIDTH)
    return shape.batch * sum(group.pages_for(tokens) for group in groups)
