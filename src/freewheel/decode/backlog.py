# SPDX-License-Identifier: Apache-2.0
"""Hidden states that a drafter has not read yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freewheel.decode.drafter import Verified
from freewheel.state import Arena


@dataclass(frozen=True)
class Backlog:
    """Of each row, the hidden states of its last computed positions, up to N of them.

    The one of position p lies at p modulo N. The host sees to it that no row has more than N.
    """

    hidden: Tensor  # float [R, N, H]
    lens: Tensor  # int32 [R]  positions that were left, up to `computed`

    @classmethod
    def build(cls, arena: Arena, shape: tuple[int, int, int], dtype: torch.dtype) -> Backlog:
        """`shape`: rows, positions, width of a hidden state."""
        return cls(
            hidden=arena.new("drafter.hidden", shape, dtype),
            lens=arena.new("drafter.backlog_lens", shape[:1], torch.int32),
        )

    def keep(self, verified: Verified) -> None:
        """Of a rectangle one query wide: leave its position for later, if it was computed."""
        rows = verified.rows.long()  # int64 [B]
        # A row that did not advance has written where its next round will write again.
        place = (verified.start % self.hidden.shape[1]).long()
        self.hidden[rows, place] = verified.hidden[:, 0]
        self.lens[rows] = self.lens[rows] + verified.accept_lens

    def joined(self, verified: Verified) -> Verified:
        """The rectangle of N + 1 queries that begins with what was left, and ends with its own."""
        count = self.hidden.shape[1]
        rows, lens = verified.rows.long(), self.lens[verified.rows.long()]  # int64, int32 [B]
        start = verified.start - lens
        column = torch.arange(count + 1, device=rows.device, dtype=torch.int32)
        kept = self.hidden[rows[:, None], ((start[:, None] + column) % count).long()]
        own = (column == lens[:, None])[..., None]  # bool [B, N + 1, 1]
        return replace(
            verified,
            start=start,
            accept_lens=lens + verified.accept_lens,
            hidden=torch.where(own, verified.hidden, kept),
        )

    def clear(self, rows: Tensor) -> None:
        """The drafter has read everything of these rows, int32 [B]."""
        self.lens.index_fill_(0, rows.long(), 0)
