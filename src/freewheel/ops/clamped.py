# SPDX-License-Identifier: Apache-2.0
"""Routing by sqrt(softplus) or by token, and experts with clamped activations (DeepSeek-V4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.dense import wide
from freewheel.ops.registry import op


def weigh(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
    """float [..., top_k]: sqrt(softplus(logit)) of the experts in ids, summing to `scale`."""
    weights = F.softplus(logits).sqrt().gather(-1, ids.long())
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale


def _fake_route_best(
    logits: Tensor, bias: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


@op(
    "route_best(Tensor logits, Tensor bias, int top_k, float scale) -> (Tensor, Tensor)",
    fake=_fake_route_best,
)
def route_best(
    logits: Tensor,  # float [..., E]
    bias: Tensor,  # float [E]
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # float [..., top_k], int32 [..., top_k]
    """Weights and ids of the experts with the highest sqrt(softplus(logit)) + bias, best first.

    Ties go to the lowest index. The weights leave the bias out.
    """
    choice = F.softplus(logits).sqrt() + bias.to(logits.dtype)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return weigh(logits, ids, scale), ids.int()


def _fake_route_by_token(
    logits: Tensor, table: Tensor, tokens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    shape = (*tokens.shape, table.shape[1])
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


@op(
    "route_by_token(Tensor logits, Tensor table, Tensor tokens, float scale) -> (Tensor, Tensor)",
    fake=_fake_route_by_token,
)
def route_by_token(
    logits: Tensor,  # float [..., E]
    table: Tensor,  # int32 [V, top_k]
    tokens: Tensor,  # int32 [...]  each below V
    scale: float,
) -> tuple[Tensor, Tensor]:  # float [..., top_k], int32 [..., top_k]
    """As `route_best`, but the experts are those that the table lists for the token."""
    ids = table.index_select(0, tokens.flatten()).view(*tokens.shape, table.shape[1])
    return weigh(logits, ids, scale), ids


def clamp_mul(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of gate_up [..., 2I], in its dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


@op(
    "clamped_silu_mul(Tensor gate_up, float limit) -> Tensor",
    fake=lambda x, _: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
)
def clamped_silu_mul(gate_up: Tensor, limit: float) -> Tensor:  # [..., 2I] -> [..., I]
    """SwiGLU whose gate is at most `limit` and whose other half is within it on both sides."""
    return clamp_mul(wide(gate_up), limit).to(gate_up.dtype)


@op(
    "clamped_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, "
    "float limit) -> Tensor",
    fake=lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def clamped_experts(
    x: Tensor,  # [..., H]
    gate_up: Tensor,  # [E, 2I, H]
    down: Tensor,  # [E, H, I]
    ids: Tensor,  # int32 [..., top_k]  -1: of nobody
    weights: Tensor,  # float [..., top_k]
    limit: float,
) -> Tensor:  # [..., H]
    """Sum over a token's experts e of weight * down_e(clamped_silu_mul(gate_up_e x))."""
    total = torch.zeros_like(wide(x))
    for expert in range(gate_up.shape[0]):
        chosen = ids == expert  # bool [..., top_k]
        weight = weights.masked_fill(~chosen, 0).sum(-1, keepdim=True).to(total.dtype)
        inner = clamp_mul(F.linear(wide(x), wide(gate_up[expert])), limit)
        output = F.linear(inner, wide(down[expert]))
        total = total + (output * weight).masked_fill(~chosen.any(-1, keepdim=True), 0)
    return total.to(x.dtype)
