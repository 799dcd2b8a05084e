# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary embedding, routing and experts with few passes and few temporaries.

On a model small enough for a CPU, the time of these is the number of torch calls for a narrow
rectangle and the page faults of temporaries for a wide one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.dense import angles_at, run_expert, wide
from freewheel.ops.registry import implement

DENSE_TOKENS = 32
"""Up to this many tokens it is faster to run every expert on all of them."""


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, a new tensor in x's dtype."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight)


@implement("rms_norm", "cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normalised(wide(x), weight, eps).to(x.dtype)


@implement("add_rms_norm", "cpu")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return normalised(wide(total), weight, eps).to(x.dtype), total


def turned_halves(x: Tensor, angles: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second elements of x's pairs [..., Dr], rotated: [..., Dr / 2] each.

    angles: [..., Dr] = (cos | sin), in x's dtype. The pairs are those of `ops.dense.rotate`.
    """
    cos, sin = angles.chunk(2, dim=-1)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    low = (first * cos).addcmul_(second, sin, value=-1)
    return low, (second * cos).addcmul_(first, sin)


@implement("rope", "cpu")
def rope(x: Tensor, positions: Tensor, rope_table: Tensor, start: int, interleaved: bool) -> Tensor:
    source, end = wide(x), start + rope_table.shape[1]
    angles = angles_at(rope_table, positions).to(source.dtype).unsqueeze(2)
    parts = list(turned_halves(source[..., start:end], angles, interleaved))
    if start:
        parts.insert(0, source[..., :start])
    if end < source.shape[-1]:
        parts.append(source[..., end:])
    return torch.cat(parts, dim=-1).to(x.dtype)


@implement("grouped_experts", "cpu")
def grouped_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    tokens = wide(x).flatten(0, -2)  # [N, H]
    chosen, shares = ids.flatten(0, -2).long(), weights.flatten(0, -2).to(tokens.dtype)
    run = _all_experts if tokens.shape[0] <= DENSE_TOKENS else _chosen_experts
    total = run(tokens, wide(gate_up), wide(down), chosen, shares)
    if shared_gate_up is not None and shared_down is not None:
        total += run_expert(tokens, shared_gate_up, shared_down)
    return total.view(x.shape).to(x.dtype)


def share_by_expert(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """[N, experts]: what each token gives to each, of ids and weights [N, top_k].

    A choice of nobody goes to a column of its own, which is cut off.
    """
    share = weights.new_zeros(weights.shape[0], experts + 1)
    return share.scatter_add_(1, ids % (experts + 1), weights)[:, :experts]


def lanes_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Lanes of ids [N, top_k] by expert, then by token, without those of nobody; of each how many.

    int64 [lanes], and `experts` numbers.
    """
    flat = ids.flatten()
    nobody, *counts = (flat + 1).bincount(minlength=experts + 1).tolist()
    return flat.argsort(stable=True)[nobody:], counts


def _all_experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """x [N, H], gate_up [E, 2I, H], down [E, H, I], ids, weights [N, top_k] -> [N, H]"""
    experts, inner_twice, hidden = gate_up.shape
    share = share_by_expert(ids, weights, experts)  # [N, E]
    both = F.linear(x, gate_up.view(-1, hidden)).view(x.shape[0], experts, inner_twice)
    gate, up = both.chunk(2, dim=-1)
    inner = F.silu(gate).mul_(up).mul_(share[:, :, None])  # [N, E, I]
    inner.masked_fill_((share == 0)[:, :, None], 0)
    return torch.bmm(inner.transpose(0, 1), down.transpose(1, 2)).sum(0)


def _chosen_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
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
            gate, up = F.linear(x.index_select(0, token), gate_up[expert]).chunk(2, dim=-1)
            output = F.linear(F.silu(gate).mul_(up), down[expert])
            total.index_add_(0, token, output.mul_(share))
    return total
