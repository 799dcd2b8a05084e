# SPDX-License-Identifier: Apache-2.0
"""The rows take in the host's letter."""

from __future__ import annotations

from torch import Tensor

from freewheel import ops
from freewheel.spec.cache import CacheGroup
from freewheel.spec.shape import StepShape
from freewheel.state.letters import ADMISSION_WORDS, InboxLayout
from freewheel.state.sequence import SequenceState


def receive_table(
    state: SequenceState, inbox: Tensor, shape: StepShape, groups: tuple[CacheGroup, ...]
) -> None:
    """Apply a letter that brings a piece of a table."""
    layout = InboxLayout.of(shape, groups, state.vocabulary)
    ops.store_table(inbox[layout.table : layout.masks], state.adjust.tables)


def receive(
    state: SequenceState, inbox: Tensor, shape: StepShape, groups: tuple[CacheGroup, ...]
) -> Tensor:
    """Apply a letter for a round of `shape`; returns the batch's rows, int32 [B].

    inbox: int32 [words], laid out as InboxLayout says.
    """
    layout = InboxLayout.of(shape, groups, state.tokens.shape[1], state.vocabulary)
    ops.apply_inbox(
        inbox,
        state.tokens,
        state.known_lens,
        state.computed_lens,
        state.draft_lens,
        state.limit_lens,
        state.minimum_lens,
        state.page_tables,
        state.temperature,
        state.top_p,
        state.min_p,
        state.top_k,
        state.seeds,
        state.uses,
        state.stop_ids,
        ADMISSION_WORDS,
        layout.batch,
        layout.feed_width,
        layout.page_writes,
    )
    rows = inbox[: shape.batch]
    if layout.adjust_words:
        words = inbox[layout.adjustments : layout.table].view(shape.batch, layout.adjust_words)
        state.adjust.receive(rows, words)
    if layout.mask_words:
        words = inbox[layout.masks : layout.words].view(shape.batch, layout.mask_words)
        ops.apply_masks(rows, words, state.adjust.mask_lens, state.adjust.masks)
    return rows
