# SPDX-License-Identifier: Apache-2.0
"""Quantised experts: only the chosen ones are dequantised, one at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.cpu.dense import lanes_by_expert
from freewheel.ops.quantised import (
    Weights,
    block_weights,
    mxfp4_weights,
    run_expert,
    with_shared,
)
from freewheel.ops.registry import implement
from freewheel.ops.repacking import repacked_weights


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
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    fixed: bool = False,
) -> Tensor:
    del fixed
    of = block_weights(gate_up, gate_up_scale, down, down_scale)
    shared = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return with_shared(_chosen_experts, x, gate_up.shape[0], of, ids, weights, limit, shared)


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
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    fixed: bool = False,
) -> Tensor:
    del fixed
    of = mxfp4_weights(gate_up, gate_up_scale, down, down_scale)
    shared = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return with_shared(_chosen_experts, x, gate_up.shape[0], of, ids, weights, limit, shared)


@implement("repacked_experts", "cpu")
def repacked_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    fixed: bool = False,
) -> Tensor:
    del fixed
    of = repacked_weights(gate_up, down)
    shared = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return with_shared(_chosen_experts, x, gate_up.shape[0], of, ids, weights, limit, shared)


def _chosen_experts(
    x: Tensor, experts: int, weights_of: Weights, ids: Tensor, weights: Tensor, limit: float | None
) -> Tensor:
    """Each chosen expert on its own tokens; lanes add up in order of expert. x is wide."""
    tokens = x.flatten(0, -2)  # [N, H]
    top_k = ids.shape[-1]
    order, counts = lanes_by_expert(ids, experts)
    shares = weights.flatten().to(tokens.dtype).index_select(0, order)[:, None]
    owners = order // top_k  # token of each lane
    total = torch.zeros_like(tokens)
    for expert, (token, share) in enumerate(
        zip(owners.split(counts), shares.split(counts), strict=True)
    ):
        if counts[expert]:
            own = run_expert(tokens.index_select(0, token), weights_of(expert, x.dtype), limit)
            total.index_add_(0, token, own.mul_(share))
    return total.view(x.shape)
