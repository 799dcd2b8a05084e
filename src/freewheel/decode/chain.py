# SPDX-License-Identifier: Apache-2.0
"""The multi-token-prediction layer as a drafter: it reads what the target read, then walks on."""

from __future__ import annotations

from torch import Tensor

from freewheel import ops
from freewheel.decode.choice import choose_next
from freewheel.decode.drafter import Verified
from freewheel.models.base import DraftHead
from freewheel.spec.shape import StepShape
from freewheel.state import CachePool, SequenceState, open_step


class ChainDrafter:
    """One MTP layer, applied `depth` times (DeepSeek-V3 technical report, section 2.2).

    At position p the layer joins the hidden state of p with the token at p + 1 and predicts the
    token at p + 2. It shares the target's page tables, and its cache rows below `computed` are a
    function of certain tokens alone.
    """

    def __init__(self, head: DraftHead) -> None:
        self._head = head

    def draft(
        self, state: SequenceState, cache: CachePool, verified: Verified, shape: StepShape
    ) -> None:
        """Catch up over the verified rectangle, then propose `depth` times, one query wide."""
        rows, live = verified.rows, verified.live
        view = open_step(state, rows, verified.start, verified.accept_lens, shape.width, shift=1)
        hidden = self._head.forward(view, cache, verified.hidden)  # float [B, W, H]
        if shape.depth == 0:
            return
        hidden = last_query(hidden, verified.accept_lens)  # float [B, 1, H]
        position = verified.start + verified.accept_lens  # int32 [B]  computed, after the commit
        for step in range(shape.depth):
            guess = choose_next(
                state, rows, position[:, None], self._head.logits(hidden), shape, steps=step + 1
            )
            live = ops.write_draft(
                state.tokens,
                state.draft_lens,
                state.limit_lens,
                rows,
                position + 1,
                live,
                guess[:, 0],
            )
            if step + 1 < shape.depth:
                view = open_step(state, rows, position, live, width=1, shift=1)
                hidden = self._head.forward(view, cache, hidden)
            position = position + 1


def last_query(hidden: Tensor, query_lens: Tensor) -> Tensor:
    """float [B, 1, H]: of hidden [B, W, H], the row's last live query (any where there is none)."""
    last = (query_lens.long() - 1).clamp(min=0)[:, None, None]
    return hidden.gather(1, last.expand(-1, 1, hidden.shape[-1]))
