# SPDX-License-Identifier: Apache-2.0
"""What proposes drafts. Drafts affect speed only, so a drafter cannot break the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from freewheel.spec.shape import StepShape
from freewheel.state import Arena, CachePool, SequenceState


@dataclass(frozen=True)
class Verified:
    """A rectangle after its commit: all that a drafter is told."""

    rows: Tensor  # int32 [B]
    start: Tensor  # int32 [B]  position of the rectangle's first column
    accept_lens: Tensor  # int32 [B]  columns of it whose tokens are now certain
    live: Tensor  # int32 [B]  1 where the row goes on and wants drafts
    hidden: Tensor  # float [B, W, H]  the target's, as its `forward` returns them


class Drafter(Protocol):
    """Called once a round, in the graph, after the commit. Writes only drafts."""

    @property
    def unread(self) -> Tensor | None:
        """int32 [R]: of each row, its last computed positions that were left for later; None: none
        ever are."""
        ...

    def open(self, arena: Arena, rows: int) -> None:
        """Make the static tensors of its own, for so many rows; before any round is captured."""
        ...

    def draft(
        self, state: SequenceState, cache: CachePool, verified: Verified, shape: StepShape
    ) -> None:
        """Keep the drafter's own state current, then write up to `shape.depth` drafts a live row.

        Must also be right when `shape.depth` is 0: a prompt's chunk passes through here.
        """
        ...


class NoDrafter:
    """Drafts nothing: every round decides one token."""

    @property
    def unread(self) -> Tensor | None:
        return None

    def open(self, arena: Arena, rows: int) -> None:
        del arena, rows

    def draft(
        self, state: SequenceState, cache: CachePool, verified: Verified, shape: StepShape
    ) -> None:
        del state, cache, verified, shape
