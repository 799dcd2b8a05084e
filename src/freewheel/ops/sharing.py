# SPDX-License-Identifier: Apache-2.0
"""Projections of one input, whatever they are stored in, and what stands behind them.

Inputs are cut into parts, whose products are left for the next op to add up: at decode sizes the
programs of a device are many and a weight's outputs few, so parts keep all programs reading, and
whoever reads them adds them on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.codecs import BLOCK, dequantise_blocks
from freewheel.ops.dense import wide
from freewheel.ops.registry import op

MANY_TOKENS = 192
"""Beyond so many tokens there are programs enough without parts."""

FEW_TOKENS = 16
"""Up to so many, programs are small, and there are more of them."""

LONG, FEW_PARTS, PARTS = 2048, 4, 8
"""Inputs from which on there are parts; how many of few tokens, and of more."""


def parts_for(tokens: int, inputs: int) -> int:
    """Parts of the inputs of a projection; by shapes alone."""
    if tokens > MANY_TOKENS or inputs < LONG:
        return 1
    return FEW_PARTS if tokens <= FEW_TOKENS else PARTS


def share_of(inputs: int, parts: int) -> int:
    """Inputs of one part: whole blocks. The last parts have fewer, or none."""
    return -(-inputs // (BLOCK * parts)) * BLOCK


def _fake_shared_products(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    plain: Tensor | None,
    gates: Tensor | None,
    parts: int,
    *_: object,
) -> Tensor:
    outputs = sum(len(own) for own in (weight, plain, gates) if own is not None)
    return wide(x.new_empty((parts, *x.shape[:-1], outputs)))


@op(
    "shared_products(Tensor x, Tensor weight, Tensor? weight_scale, Tensor? plain, Tensor? gates, "
    "int parts, bool fixed=False) -> Tensor",
    fake=_fake_shared_products,
)
def shared_products(
    x: Tensor,  # float [..., K]
    weight: Tensor,  # [N, K]  float8_e4m3fn if there is a scale, else as x
    weight_scale: Tensor | None,  # float32 [ceil(N / 128), ceil(K / 128)]
    plain: Tensor | None,  # [M, K]  as x
    gates: Tensor | None,  # float [G, K]
    parts: int,
    fixed: bool = False,
) -> Tensor:  # float [parts, ..., N + M + G]
    """x @ [weight | plain | gates]^T, the sum over the first dimension: a part has `share_of` K.

    In float32 (float64 of a float64 x) and never rounded to x's dtype; a kernel may round the
    products of `weight` so where there is one part, as `block_linear` does. `fixed`: kernels for
    a GPU keep one order of sums, whatever the number of tokens; these are at most MANY_TOKENS.
    """
    values = wide(x)
    dense = weight if weight_scale is None else dequantise_blocks(weight, weight_scale)
    own = [part.to(values.dtype) for part in (dense, plain, gates) if part is not None]
    share = share_of(x.shape[-1], parts)
    pieces = [slice(at, at + share) for at in range(0, parts * share, share)]
    products = [
        torch.cat([F.linear(values[..., piece], rows[:, piece]) for rows in own], -1)
        for piece in pieces
    ]
    return torch.stack(products)
