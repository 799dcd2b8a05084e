# SPDX-License-Identifier: Apache-2.0
"""Where each word stands in the two letters of a round: one int32 vector each way.

The layouts are functions of the static shape alone, so a graph reads and writes fixed offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.spec.cache import CacheGroup
from freewheel.spec.plan import feed_bound, page_writes_bound
from freewheel.spec.sampling import MAX_STOP_IDS
from freewheel.spec.shape import StepShape

ADMISSION_WORDS = 11 + MAX_STOP_IDS
"""admit, known, computed, limit, minimum, temperature, top_k, top_p, min_p, seed low, seed high,
then the stop ids. Floats travel as their bits."""

PAGE_WRITE_WORDS = 4
"""row, group, column, page. An unused one is all zero: it rewrites scratch with scratch."""

RESULT_WORDS = 5
"""count, finish code, computed, drafted, agreed; then the tokens."""

FINISH_NONE, FINISH_STOP, FINISH_LENGTH = 0, 1, 2


@dataclass(frozen=True)
class InboxLayout:
    """Offsets, in words, of the letter to the device for rounds of `shape`."""

    batch: int
    feed_width: int
    page_writes: int

    @classmethod
    def of(cls, shape: StepShape, groups: tuple[CacheGroup, ...], row_width: int) -> InboxLayout:
        """A letter for rounds of `shape` over rows of `row_width` tokens."""
        writes = page_writes_bound(shape, groups, row_width)
        return cls(shape.batch, feed_bound(shape, row_width), writes)

    @property
    def admissions(self) -> int:
        """After `rows` [B]: [B, ADMISSION_WORDS]."""
        return self.batch

    @property
    def feed_spans(self) -> int:
        """[B, 2]: start and length of the row's feed."""
        return self.admissions + self.batch * ADMISSION_WORDS

    @property
    def feed_tokens(self) -> int:
        """[B, feed_width]."""
        return self.feed_spans + self.batch * 2

    @property
    def writes(self) -> int:
        """[page_writes, PAGE_WRITE_WORDS]."""
        return self.feed_tokens + self.batch * self.feed_width

    @property
    def words(self) -> int:
        return self.writes + self.page_writes * PAGE_WRITE_WORDS


@dataclass(frozen=True)
class OutboxLayout:
    """The letter home of rounds of `shape`: int32 [B, RESULT_WORDS + choices]."""

    batch: int
    choices: int

    @classmethod
    def of(cls, shape: StepShape) -> OutboxLayout:
        return cls(shape.batch, shape.choices)

    @property
    def row_words(self) -> int:
        return RESULT_WORDS + self.choices
