# SPDX-License-Identifier: Apache-2.0
"""Where each word stands in the two letters of a round: one int32 vector each way.

The layouts are functions of the static shape alone, so a graph reads and writes fixed offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.spec.adjustments import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES
from freewheel.spec.cache import CacheGroup
from freewheel.spec.plan import feed_bound, page_writes_bound
from freewheel.spec.sampling import MAX_LOGPROBS, MAX_STOP_IDS
from freewheel.spec.shape import StepShape
from freewheel.state.adjust import allowed_words

ADMISSION_WORDS = 12 + MAX_STOP_IDS
"""admit, known, computed, limit, minimum, temperature, top_k, top_p, min_p, seed low, seed high,
uses, then the stop ids. Floats travel as their bits."""

ADJUST_WORDS = 10 + 2 * MAX_BIASES + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
"""uses, prompt length, presence, frequency, repetition; the grammar's base, classes, start, trigger
and budget; bias ids, biases, bad words. Behind them, for each row, one bit for each token that is
allowed. All zero where nothing is admitted."""

TABLE_WORDS = 1 << 18
"""Words of a table that one round brings, two cells each; before them, first cell and count."""

PAGE_WRITE_WORDS = 4
"""row, group, column, page. An unused one is all zero: it rewrites scratch with scratch."""

RESULT_WORDS = 5
"""count, finish code, computed, drafted, agreed; then the tokens."""

SCORE_WORDS = 1 + 2 * MAX_LOGPROBS
"""A token's log-probability, the ids of the likeliest tokens, and their log-probabilities."""

NOWHERE = -1
"""The position of a mask that is for none."""

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR = 0, 1, 2, 3


@dataclass(frozen=True)
class InboxLayout:
    """Offsets, in words, of the letter to the device for rounds of `shape`."""

    batch: int
    feed_width: int
    page_writes: int
    adjust_words: int = 0
    table_words: int = 0
    mask_words: int = 0

    @classmethod
    def of(
        cls,
        shape: StepShape,
        groups: tuple[CacheGroup, ...],
        row_width: int,
        vocabulary: int = 0,
    ) -> InboxLayout:
        """A letter for rounds of `shape` over rows of `row_width` tokens.

        `vocabulary`: tokens, of which a request may allow some. Adjustments come with admissions,
        and these with prompts: decoding letters have no room for them.
        """
        writes = page_writes_bound(shape, groups, row_width)
        admits = shape.adjusts and shape.for_prompts
        words = ADJUST_WORDS + allowed_words(vocabulary) if admits else 0
        table = 2 + TABLE_WORDS if shape.tables else 0
        mask = 1 + allowed_words(vocabulary) if shape.guided else 0
        return cls(shape.batch, feed_bound(shape, row_width), writes, words, table, mask)

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
    def adjustments(self) -> int:
        """[B, adjust_words]."""
        return self.writes + self.page_writes * PAGE_WRITE_WORDS

    @property
    def table(self) -> int:
        """[table_words]."""
        return self.adjustments + self.batch * self.adjust_words

    @property
    def masks(self) -> int:
        """[B, mask_words]: the position that a row's mask is for, then its bits.

        0: none came, and the row keeps the one that it has; NOWHERE: the row has none.
        """
        return self.table + self.table_words

    @property
    def words(self) -> int:
        return self.masks + self.batch * self.mask_words


@dataclass(frozen=True)
class OutboxLayout:
    """The letter home of rounds of `shape`: int32 [B, row_words].

    `reported`: tokens of a row that come with their scores; `echoed`: prompt positions, likewise.
    `picked`: words of picked keys.
    """

    batch: int
    choices: int
    reported: int = 0
    echoed: int = 0
    picked: int = 0

    @classmethod
    def of(cls, shape: StepShape, picked: int = 0) -> OutboxLayout:
        """`picked`: words of the keys that one query picks (`PickedLayers.words`)."""
        reported = shape.choices if shape.reports else 0
        echoed = shape.width if shape.echoes else 0
        return cls(shape.batch, shape.choices, reported, echoed, picked if shape.shows else 0)

    @property
    def scores(self) -> int:
        """After the result and its tokens: [reported, SCORE_WORDS]."""
        return RESULT_WORDS + self.choices

    @property
    def echo(self) -> int:
        """[echoed, SCORE_WORDS]: of the token after each position of the rectangle."""
        return self.scores + self.reported * SCORE_WORDS

    @property
    def picks(self) -> int:
        """[picked]: of each layer that picks, in order, numbers of keys, -1 padded."""
        return self.echo + self.echoed * SCORE_WORDS

    @property
    def row_words(self) -> int:
        return self.picks + self.picked
