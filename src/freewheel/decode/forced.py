# SPDX-License-Identifier: Apache-2.0
"""A target that agrees with drafts as often as it is told: for measuring speed, never for text.

A benchmark on random weights needs drafts that are right at a given rate. Making the target agree
costs one small write into its logits; whatever else a round does, it does as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from freewheel.models.base import Model
from freewheel.spec.cache import CacheGroup
from freewheel.spec.model import ModelSpec
from freewheel.spec.storage import RowStorage
from freewheel.state import CachePool, StepView

SCALE = 1000
"""Means are kept to this part of a token."""


@dataclass
class ForcedTarget:
    """`model`, but for its choice where a draft stands: rounds decide `mean` tokens on average.

    Rounds begin at the positions floor(n * mean), n = 0, 1, ..: a draft is agreed to unless a round
    must begin at its position. That is a function of the position alone, so nothing is counted,
    neither on the device nor on the host, and a row that begins elsewhere falls into step by its
    second round. `mean` is at least 1; drafts must be as many as a round may accept. Greedy rows
    follow it exactly; at a temperature the scores are forced too.
    """

    model: Model
    mean: float
    _view: list[StepView] = field(default_factory=list[StepView])

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def cache_groups(
        self, page_size: int, dtype: str, storage: RowStorage | None = None
    ) -> tuple[CacheGroup, ...]:
        return self.model.cache_groups(page_size, dtype, storage)

    def forward(self, view: StepView, cache: CachePool) -> Tensor:
        """Hidden states of the model; the view is kept for `logits`."""
        self._view[:] = [view]
        return self.model.forward(view, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float [B, C, V] of hidden [B, C, H]; forced where all the view's queries are given."""
        logits = self.model.logits(hidden)
        (view,) = self._view
        if hidden.shape[1] == view.tokens.shape[1] > 1:
            force_agreement(logits, view.tokens, view.positions, round(self.mean * SCALE))
        return logits


def force_agreement(logits: Tensor, tokens: Tensor, positions: Tensor, mean: int) -> None:
    """Raise each following token's logit above all others, or sink it where a round must begin.

    logits float [B, W, V], written; tokens, positions int32 [B, W]; mean in parts of SCALE.
    """
    follower = positions[:, 1:].long()  # int64 [B, W - 1]
    # The least n with n * mean >= SCALE * position; floor(n * mean / SCALE) is the position if a
    # round begins there.
    n = (follower * SCALE + mean - 1) // mean
    begins = n * mean // SCALE == follower  # bool [B, W - 1]
    forced = torch.where(begins, -torch.inf, torch.inf).to(logits.dtype)
    logits[:, :-1].scatter_(2, tokens[:, 1:].long()[..., None], forced[..., None])
