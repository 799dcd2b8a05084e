# SPDX-License-Identifier: Apache-2.0
"""The multi-token-prediction layer as a drafter: it reads what the target read, then walks on."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel import ops
from freewheel.decode.backlog import Backlog
from freewheel.decode.choice import choose_next
from freewheel.decode.drafter import Verified
from freewheel.models.base import DraftHead
from freewheel.spec.shape import StepShape
from freewheel.state import Arena, CachePool, SequenceState, open_step


class ChainDrafter:
    """One MTP layer, applied `depth` times (DeepSeek-V3 technical report, section 2.2).

    At position p the layer joins the hidden state of p with the token at p + 1 and predicts the
    token at p + 2. It shares the target's page tables, and its cache rows below `computed` are a
    function of certain tokens alone.

    Where some decoding rounds draft and others do not, the latter only keep the hidden state, and
    the layer reads up to `lag` of them at once, later (decision 32).
    """

    def __init__(self, head: DraftHead, lag: int = 0, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: of hidden states."""
        self._head, self._lag, self._dtype = head, lag, dtype
        self._backlog: Backlog | None = None

    @property
    def unread(self) -> Tensor | None:
        return None if self._backlog is None else self._backlog.lens

    def open(self, arena: Arena, rows: int) -> None:
        """The backlog, if there may be one."""
        if self._lag:
            shape = (rows, self._lag, self._head.hidden_width)
            self._backlog = Backlog.build(arena, shape, self._dtype)

    def draft(
        self, state: SequenceState, cache: CachePool, verified: Verified, shape: StepShape
    ) -> None:
        """Catch up over the verified rectangle, then propose `depth` times, one query wide."""
        rows, live = verified.rows, verified.live
        if self._backlog is not None:
            if shape.lags:
                self._backlog.keep(verified)
                return
            if shape.catches_up:
                verified = self._backlog.joined(verified)
            if shape.catches_up or shape.for_prompts:
                self._backlog.clear(rows)
        width = verified.hidden.shape[1]
        view = open_step(state, rows, verified.start, verified.accept_lens, width, shift=1)
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
