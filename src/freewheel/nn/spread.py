# SPDX-License-Identifier: Apache-2.0
"""Experts over the ranks of all copies of a model: tokens go to them, and results come back.

A rank exchanges with the ranks that hold the same share of the other copies' layers. What it gets
back is its share of its copy's result, to be summed over the copy's ranks as any other part is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel import ops
from freewheel.spec.mesh import REPLICA_RANKS

GATHER_TOKENS = 16
"""Up to so many tokens of a copy every rank sees all tokens of all copies, which takes two
exchanges and no sorting; beyond, each rank is sent those for its experts."""

Part = Callable[[Tensor, Tensor, Tensor], Tensor]
"""[..., H] of x [..., H], ids int32 [..., top_k] and weights float [..., top_k]."""


@dataclass(frozen=True)
class Dealing:
    """Who holds which experts, whole: rank r of those exchanged with has `count`, from the
    (`first` + r * `step`)-th on."""

    first: int
    step: int
    count: int


@dataclass(frozen=True)
class SpreadExperts:
    """`part` takes choices among all experts, `own` among this rank's, counted from its first.

    `own` and `dealing` are None where each expert is cut: then all ranks see all tokens.
    """

    part: Part
    replicas: int
    own: Part | None = None
    dealing: Dealing | None = None

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As any experts', but for a share of the sum. The same number of tokens on every rank."""
        flat = (x.flatten(0, -2), ids.flatten(0, -2), weights.flatten(0, -2))  # [T, ...] each
        if self.own is None or self.dealing is None or flat[0].shape[0] <= GATHER_TOKENS:
            result = self._gathered(*flat)
        else:
            result = _exchanged(self.own, self.dealing, self.replicas, *flat)
        return result.view(x.shape)

    def _gathered(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, H]: every rank computes its share of all copies' tokens; the sums go home."""
        raw = _joined((x, ids, weights))  # uint8 [T, bytes]
        every = ops.all_gather(raw.flatten(), self.replicas, REPLICA_RANKS)
        parts = _apart(every.view(self.replicas, *raw.shape), (x, ids, weights))
        return ops.scatter_sum(self.part(*parts), REPLICA_RANKS)


def _exchanged(
    own: Part, dealing: Dealing, replicas: int, x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """[T, H]: a rank computes what was sent to it, and sends it back."""
    *sent, order = ops.dispatch_tokens(
        x, ids, weights, dealing.first, dealing.step, dealing.count, replicas
    )
    received = _apart(ops.all_to_all(_joined(sent), REPLICA_RANKS), (x, ids, weights))
    return ops.combine_tokens(ops.all_to_all(own(*received), REPLICA_RANKS), order)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """uint8 [..., bytes]: parts [..., N] side by side, so that they travel together."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def _apart(raw: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of `_joined` again: [..., N] each, N and dtype as in `like`."""
    sizes = [one.shape[-1] * one.element_size() for one in like]
    pieces = raw.split(sizes, dim=-1)
    return [piece.contiguous().view(one.dtype) for piece, one in zip(pieces, like, strict=True)]
