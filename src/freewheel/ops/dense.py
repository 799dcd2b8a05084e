# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary embedding, routing and experts: ops that look at one token at a time.

Every sum is taken in float32, or in float64 where the input is float64, and the result is rounded
once to the input's dtype. A token's result does not depend on the other tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.registry import op


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype in which sums are taken: at least float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def normalise_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def normalise_layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in x's dtype."""
    return F.layer_norm(x, (x.shape[-1],), weight.to(x.dtype), bias.to(x.dtype), eps)


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate all dimensions of x [..., D] by angles [..., D] = (cos | sin), in x's dtype.

    Pair i is (x[2i], x[2i+1]) when `interleaved`, else (x[i], x[i + D/2]). In both cases the first
    elements of all pairs come out first and the second elements after them, as transformers lays
    them out: queries and keys agree, so their products do not depend on it.
    """
    cos, sin = angles.to(x.dtype).chunk(2, dim=-1)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def angles_at(rope_table: Tensor, positions: Tensor) -> Tensor:
    """Rows of `rope_table` [T, D] at `positions` int32 [...]: [..., D]."""
    return F.embedding(positions, rope_table)


def _like_first(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@op("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", fake=_like_first)
def rms_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [..., D]
    """Root-mean-square norm (arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight."""
    return normalise_rms(wide(x), weight, eps).to(x.dtype)


def _like_both(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _like_first(x), _like_first(x)


@op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=_like_both,
)
def add_rms_norm(
    x: Tensor,  # [..., D]
    residual: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    eps: float,
) -> tuple[Tensor, Tensor]:  # [..., D], [..., D]
    """(rms_norm(sum), sum) where sum = x + residual, rounded to x's dtype before the norm."""
    total = x + residual
    return normalise_rms(wide(total), weight, eps).to(x.dtype), total


@op("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", fake=_like_first)
def layer_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    bias: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [..., D]
    """Layer norm (arXiv:1607.06450) with the biased variance."""
    return normalise_layer(wide(x), weight, bias, eps).to(x.dtype)


@op(
    "rope(Tensor x, Tensor positions, Tensor rope_table, int start, bool interleaved) -> Tensor",
    fake=_like_first,
)
def rope(
    x: Tensor,  # [B, W, H, D]
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin), Dr/2 columns each
    start: int,
    interleaved: bool,
) -> Tensor:  # [B, W, H, D]
    """Rotary embedding (arXiv:2104.09864) of dimensions start .. start + Dr; the rest pass through.

    The layout of the rotated dimensions is that of `rotate`.
    """
    end = start + rope_table.shape[1]
    angles = angles_at(rope_table, positions)[:, :, None]  # [B, W, 1, Dr]
    turned = rotate(wide(x[..., start:end]), angles, interleaved).to(x.dtype)
    return torch.cat((x[..., :start], turned, x[..., end:]), dim=-1)


def _fake_route(
    logits: Tensor, bias: Tensor, n_group: int, topk_group: int, top_k: int, *_: object
) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


@op(
    "route(Tensor logits, Tensor bias, int n_group, int topk_group, int top_k, bool normalise, "
    "float scale) -> (Tensor, Tensor)",
    fake=_fake_route,
)
def route(
    logits: Tensor,  # float [..., E]
    bias: Tensor,  # float [E]  e_score_correction_bias
    n_group: int,
    topk_group: int,
    top_k: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:  # float [..., top_k], int32 [..., top_k]
    """Weights and ids of each token's experts, best first (DeepSeek-V3, arXiv:2412.19437, 2.1.2).

    Experts are chosen by sigmoid(logit) + bias, within the `topk_group` of `n_group` equal groups
    whose two best experts have the highest sum. Ties go to the lowest index, of groups as of
    experts. Weights are the scores without bias; `normalise` makes them sum to `scale`.
    """
    scores = logits.sigmoid()
    choice = scores + bias.to(scores.dtype)
    if topk_group < n_group:
        choice = _mask_groups(choice, n_group, topk_group)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = scores.gather(-1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids.int()


def _mask_groups(choice: Tensor, n_group: int, topk_group: int) -> Tensor:
    grouped = choice.unflatten(-1, (n_group, -1))  # [..., n_group, E / n_group]
    strength = grouped.topk(2, dim=-1).values.sum(-1)  # [..., n_group]
    order = strength.sort(dim=-1, descending=True, stable=True).indices
    dropped = torch.zeros_like(strength, dtype=torch.bool).scatter(
        -1, order[..., topk_group:], True
    )
    return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(-2)


@op(
    "silu_mul(Tensor gate_up) -> Tensor",
    fake=lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
)
def silu_mul(gate_up: Tensor) -> Tensor:  # [..., 2I] -> [..., I]
    """silu(gate) * up of the halves of the last dimension (SwiGLU, arXiv:2002.05202)."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _fake_experts(x: Tensor, *_: object) -> Tensor:
    return _like_first(x)


@op(
    "grouped_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, "
    "Tensor? shared_gate_up=None, Tensor? shared_down=None) -> Tensor",
    fake=_fake_experts,
)
def grouped_experts(
    x: Tensor,  # [..., H]
    gate_up: Tensor,  # [E, 2I, H]
    down: Tensor,  # [E, H, I]
    ids: Tensor,  # int32 [..., top_k]  -1: of nobody
    weights: Tensor,  # float [..., top_k]
    shared_gate_up: Tensor | None = None,  # [2J, H]
    shared_down: Tensor | None = None,  # [H, J]
) -> Tensor:  # [..., H]
    """Sum over a token's experts e of weight * down_e(silu(gate_e x) * up_e x).

    An expert that a token did not choose adds nothing to it, even if it overflows. A shared one,
    of any width, adds to every token with weight 1.
    """
    total = torch.zeros_like(wide(x))
    for expert in range(gate_up.shape[0]):
        chosen = ids == expert  # bool [..., top_k]
        weight = weights.masked_fill(~chosen, 0).sum(-1, keepdim=True).to(total.dtype)
        output = run_expert(wide(x), gate_up[expert], down[expert])
        total = total + (output * weight).masked_fill(~chosen.any(-1, keepdim=True), 0)
    if shared_gate_up is not None and shared_down is not None:
        total = total + run_expert(wide(x), shared_gate_up, shared_down)
    return total.to(x.dtype)


def run_expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [..., H] through gate_up [2I, H] and down [H, I], in x's dtype: [..., H]."""
    gate, up = F.linear(x, gate_up.to(x.dtype)).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down.to(x.dtype))
