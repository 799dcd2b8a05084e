# SPDX-License-Identifier: Apache-2.0
"""Quantised experts: only the chosen ones are dequantised, one at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.dense import wide
from freewheel.ops.quantised import Weights, block_weights, gated, mxfp4_weights
from freewheel.ops.registry import implement


@implement("block_experts", "cpu")
def block_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    limit: float | None = None,
) -> Tensor:
    of = block_weights(gate_up, gate_up_scale, down, down_scale)
    return _chosen_experts(x, gate_up.shape[0], of, ids, weights, limit)


@implement("mxfp4_experts", "cpu")
def mxfp4_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    limit: float | None = None,
) -> Tensor:
    of = mxfp4_weights(gate_up, gate_up_scale, down, down_scale)
    return _chosen_experts(x, gate_up.shape[0], of, ids, weights, limit)


def _chosen_experts(
    x: Tensor, experts: int, weights_of: Weights, ids: Tensor, weights: Tensor, limit: float | None
) -> Tensor:
    """Each chosen expert on its own tokens; a token's lanes add up in order of expert."""
    tokens = wide(x).flatten(0, -2)  # [N, H]
    top_k, flat = ids.shape[-1], ids.flatten()
    order = flat.argsort(stable=True)  # lanes by expert, then by token
    counts = flat.bincount(minlength=experts).tolist()
    shares = weights.flatten().to(tokens.dtype).index_select(0, order)[:, None]
    owners = order // top_k  # token of each lane
    total = torch.zeros_like(tokens)
    for expert, (token, share) in enumerate(
        zip(owners.split(counts), shares.split(counts), strict=True)
    ):
        if counts[expert]:
            gate_up, down = weights_of(expert, tokens.dtype)
            inner = gated(F.linear(tokens.index_select(0, token), gate_up), limit)
            total.index_add_(0, token, F.linear(inner, down).mul_(share))
    return total.view(x.shape).to(x.dtype)
