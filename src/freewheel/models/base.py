# SPDX-License-Identifier: Apache-2.0
"""What the round may know of a model: two protocols."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from freewheel.spec.cache import CacheGroup
from freewheel.spec.model import ModelSpec
from freewheel.spec.storage import RowStorage
from freewheel.state import CachePool, StepView


class Model(Protocol):
    """A language model over paged caches."""

    @property
    def spec(self) -> ModelSpec: ...

    def cache_groups(
        self, page_size: int, dtype: str, storage: RowStorage | None = None
    ) -> tuple[CacheGroup, ...]:
        """What the model stores for a token: pages of `page_size` tokens.

        `dtype`: what is computed in. `storage`: how rows are stored; None is in that dtype.
        Includes what its draft head stores, if one was loaded with it. Raises ConfigError if the
        model's rows cannot be stored so.
        """
        ...

    def forward(self, view: StepView, cache: CachePool) -> Tensor:
        """Hidden states [B, W, H] of the queries in `view`: what `logits` and a draft head read.

        Behind the final norm, or whatever else the family hands on: H is its own affair.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [..., V] (float64 in a float64 model) of hidden [..., H]."""
        ...


class DraftHead(Protocol):
    """A multi-token-prediction head that reads a model's hidden states."""

    @property
    def hidden_width(self) -> int:
        """H: elements of one hidden state."""
        ...

    def forward(self, view: StepView, cache: CachePool, hidden: Tensor) -> Tensor:
        """Hidden states [B, W, H], as the model's own, which `logits` and the head read.

        `hidden` [B, W, H]: of the view's positions, the model's or the head's own. `view.tokens`:
        of the positions one further on.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [..., V] (float64 in a float64 model) of hidden [..., H]."""
        ...
