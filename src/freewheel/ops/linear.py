# SPDX-License-Identifier: Apache-2.0
"""Projections that decide rather than transform: router scores, the gates of index heads."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.registry import op


@op(
    "wide_linear(Tensor x, Tensor weight, bool fixed=False) -> Tensor",
    fake=lambda x, weight, *_: weight.new_empty((*x.shape[:-1], weight.shape[0])),
)
def wide_linear(
    x: Tensor,  # [..., I]
    weight: Tensor,  # float [O, I]
    fixed: bool = False,
) -> Tensor:  # [..., O], of weight's dtype
    """x @ weight^T in the weight's dtype, at least as wide as x's.

    `fixed`: kernels for a GPU keep one order of sums, whatever the number of tokens.
    """
    return F.linear(x.to(weight.dtype), weight)
