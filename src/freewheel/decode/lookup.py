# SPDX-License-Identifier: Apache-2.0
"""Prompt look-up as a drafter: what followed the row's ending when it last stood in the row."""

from __future__ import annotations

from torch import Tensor

from freewheel import ops
from freewheel.decode.drafter import Verified
from freewheel.spec.shape import StepShape
from freewheel.state import Arena, CachePool, SequenceState

LONGEST, SHORTEST = 4, 2
"""Endings searched for, in tokens. One token alone matches too much to be a guess."""


class LookupDrafter:
    """Needs no weights: good where the answer repeats the prompt, silent where nothing matches."""

    @property
    def unread(self) -> Tensor | None:
        return None

    def open(self, arena: Arena, rows: int) -> None:
        del arena, rows

    def draft(
        self, state: SequenceState, cache: CachePool, verified: Verified, shape: StepShape
    ) -> None:
        """Write up to `shape.depth` drafts, copied from behind the latest match."""
        del cache
        if shape.depth == 0:
            return
        rows = verified.rows
        guesses, lens = ops.lookup(
            state.tokens, state.known_lens, rows, shape.depth, LONGEST, SHORTEST
        )
        place = verified.start + verified.accept_lens + 1  # int32 [B]  known, after the commit
        for step in range(shape.depth):
            live = verified.live * (lens > step).int()
            ops.write_draft(
                state.tokens,
                state.draft_lens,
                state.limit_lens,
                rows,
                place + step,
                live,
                guesses[:, step],
            )
