# SPDX-License-Identifier: Apache-2.0
"""Clamped experts: all of them on few tokens, each on its own tokens otherwise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.clamped import clamp_mul
from freewheel.ops.cpu.dense import DENSE_TOKENS, lanes_by_expert, share_by_expert
from freewheel.ops.dense import wide
from freewheel.ops.registry import implement


@implement("clamped_silu_mul", "cpu")
def clamped_silu_mul(gate_up: Tensor, limit: float) -> Tensor:
    return clamp_mul(wide(gate_up), limit).to(gate_up.dtype)


@implement("clamped_experts", "cpu")
def clamped_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, limit: float
) -> Tensor:
    tokens = wide(x).flatten(0, -2)  # [N, H]
    chosen, shares = ids.flatten(0, -2).long(), weights.flatten(0, -2).to(tokens.dtype)
    run = _all_experts if tokens.shape[0] <= DENSE_TOKENS else _chosen_experts
    return run(tokens, wide(gate_up), wide(down), chosen, shares, limit).view(x.shape).to(x.dtype)


def _all_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, limit: float
) -> Tensor:
    """x [N, H], gate_up [E, 2I, H], down [E, H, I], ids, weights [N, top_k] -> [N, H]"""
    experts, inner_twice, hidden = gate_up.shape
    share = share_by_expert(ids, weights, experts)  # [N, E]
    both = F.linear(x, gate_up.view(-1, hidden)).view(x.shape[0], experts, inner_twice)
    inner = clamp_mul(both, limit).mul_(share[:, :, None])  # [N, E, I]
    inner.masked_fill_((share == 0)[:, :, None], 0)
    return torch.bmm(inner.transpose(0, 1), down.transpose(1, 2)).sum(0)


def _chosen_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, limit: float
) -> Tensor:
    """The same by running each expert on its own tokens only."""
    total = torch.zeros_like(x)
    order, counts = lanes_by_expert(ids, gate_up.shape[0])
    shares = weights.flatten().index_select(0, order)[:, None]
    owners = order // ids.shape[1]  # token of each lane
    for expert, (token, share) in enumerate(
        zip(owners.split(counts), shares.split(counts), strict=True)
    ):
        if counts[expert]:
            inner = clamp_mul(F.linear(x.index_select(0, token), gate_up[expert]), limit)
            total.index_add_(0, token, F.linear(inner, down[expert]).mul_(share))
    return total
