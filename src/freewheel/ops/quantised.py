# SPDX-License-Identifier: Apache-2.0
"""Projections and experts whose weights stay in FP8 or MXFP4: only weights are quantised.

Activations keep their dtype, so a token's result does not depend on how it was rounded with others,
and at decode sizes the bytes of the weights are what costs. Sums are wide, as in `ops.dense`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.clamped import clamp_mul
from freewheel.ops.codecs import BLOCK, dequantise_blocks, dequantise_mxfp4
from freewheel.ops.dense import wide
from freewheel.ops.registry import op

Weights = Callable[[int, torch.dtype], tuple[Tensor, Tensor]]
"""(expert, dtype) -> its gate_up [2I, H] and down [H, I], dequantised."""

Shared = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""gate_up, its scale, down and its scale of a shared expert, or None four times."""

SumExperts = Callable[[Tensor, int, Weights, Tensor, Tensor, float | None], Tensor]
"""`sum_experts` or its like: a tensor of its own."""


def gated(gate_up: Tensor, limit: float | None) -> Tensor:  # [..., 2I] -> [..., I]
    """SwiGLU, clamped as `clamped_silu_mul` does if there is a limit."""
    if limit is not None:
        return clamp_mul(gate_up, limit)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def dequantise_gate_up(
    weight: Tensor,  # float8_e4m3fn [..., 2I, H]
    scale: Tensor,  # float32 [..., 2 * ceil(I / 128), ceil(H / 128)]
    dtype: torch.dtype,
) -> Tensor:  # dtype [..., 2I, H]
    """Both halves, each with a grid of blocks of its own that starts at its first row."""
    halves = zip(weight.chunk(2, -2), scale.chunk(2, -2), strict=True)
    return torch.cat([dequantise_blocks(w, s, dtype=dtype) for w, s in halves], -2)


def _fake_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@op(
    "block_linear(Tensor x, Tensor weight, Tensor weight_scale, int block_n=128, int block_k=128, "
    "bool fixed=False) -> Tensor",
    fake=_fake_linear,
)
def block_linear(
    x: Tensor,  # float [..., K]
    weight: Tensor,  # float8_e4m3fn [N, K]
    weight_scale: Tensor,  # float32 [ceil(N / block_n), ceil(K / block_k)]
    block_n: int = BLOCK,
    block_k: int = BLOCK,
    fixed: bool = False,
) -> Tensor:  # [..., N], of x's dtype
    """x @ (weight * its block's scale)^T, summed in float32 or wider and rounded once.

    `fixed`: kernels for a GPU keep one order of sums, whatever the number of tokens.
    """
    values = wide(x)
    dense = dequantise_blocks(weight, weight_scale, block_n, block_k, values.dtype)
    return F.linear(values, dense).to(x.dtype)


def fake_experts(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def run_expert(x: Tensor, weights: tuple[Tensor, Tensor], limit: float | None) -> Tensor:
    """x [..., H] through gate_up [2I, H] and down [H, I], all in x's dtype: [..., H]."""
    return F.linear(gated(F.linear(x, weights[0]), limit), weights[1])


def sum_experts(
    x: Tensor, experts: int, weights_of: Weights, ids: Tensor, weights: Tensor, limit: float | None
) -> Tensor:
    """As `grouped_experts`: every expert on every token, masked where it was not chosen.

    x is wide, and so is the sum.
    """
    total = torch.zeros_like(x)
    for expert in range(experts):
        chosen = ids == expert  # bool [..., top_k]
        weight = weights.masked_fill(~chosen, 0).sum(-1, keepdim=True).to(total.dtype)
        output = run_expert(x, weights_of(expert, x.dtype), limit)
        total = total + (output * weight).masked_fill(~chosen.any(-1, keepdim=True), 0)
    return total


def block_weights(
    gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Weights:
    """Of FP8 experts; the arguments are those of `block_experts`."""

    def of(expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            dequantise_gate_up(gate_up[expert], gate_up_scale[expert], dtype),
            dequantise_blocks(down[expert], down_scale[expert], dtype=dtype),
        )

    return of


@op(
    "block_experts(Tensor x, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, "
    "Tensor ids, Tensor weights, float? limit=None, Tensor? shared_gate_up=None, "
    "Tensor? shared_gate_up_scale=None, Tensor? shared_down=None, Tensor? shared_down_scale=None, "
    "bool fixed=False) -> Tensor",
    fake=fake_experts,
)
def block_experts(
    x: Tensor,  # float [..., H]
    gate_up: Tensor,  # float8_e4m3fn [E, 2I, H]
    gate_up_scale: Tensor,  # float32 [E, 2 * ceil(I / 128), ceil(H / 128)]  gate's, then up's
    down: Tensor,  # float8_e4m3fn [E, H, I]
    down_scale: Tensor,  # float32 [E, ceil(H / 128), ceil(I / 128)]
    ids: Tensor,  # int32 [..., top_k]  -1: of nobody
    weights: Tensor,  # float [..., top_k]
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,  # float8_e4m3fn [2J, H]
    shared_gate_up_scale: Tensor | None = None,  # float32 [2 * ceil(J / 128), ceil(H / 128)]
    shared_down: Tensor | None = None,  # float8_e4m3fn [H, J]
    shared_down_scale: Tensor | None = None,  # float32 [ceil(H / 128), ceil(J / 128)]
    fixed: bool = False,
) -> Tensor:  # [..., H]
    """`grouped_experts` over FP8 weights in 128 x 128 blocks; with a limit, `clamped_experts`.

    A shared expert, of any width, adds to every token with weight 1; its four tensors come as one.
    `fixed`: kernels for a GPU keep one order of sums, whatever the number of tokens.
    """
    of = block_weights(gate_up, gate_up_scale, down, down_scale)
    shared = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return with_shared(sum_experts, x, gate_up.shape[0], of, ids, weights, limit, shared)


def with_shared(
    sum_chosen: SumExperts, x: Tensor, experts: int, weights_of: Weights, ids: Tensor,
    weights: Tensor, limit: float | None, shared: Shared,
) -> Tensor:  # fmt: skip
    """What `sum_chosen` finds in wide numbers, and a shared expert, rounded once to x's dtype."""
    values = wide(x)
    total = sum_chosen(values, experts, weights_of, ids, weights, limit)
    return total.add_(shared_output(values, shared, limit)).to(x.dtype)


def shared_output(x: Tensor, shared: Shared, limit: float | None) -> Tensor:
    """[..., H] of wide x through a shared FP8 expert; zeros if there is none."""
    gate_up, gate_up_scale, down, down_scale = shared
    if gate_up is None or gate_up_scale is None or down is None or down_scale is None:
        return torch.zeros_like(x)
    weights = (
        dequantise_gate_up(gate_up, gate_up_scale, x.dtype),
        dequantise_blocks(down, down_scale, dtype=x.dtype),
    )
    return run_expert(x, weights, limit)


def mxfp4_weights(
    gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Weights:
    """Of MXFP4 experts; the arguments are those of `mxfp4_experts`."""

    def of(expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            dequantise_mxfp4(gate_up[expert], gate_up_scale[expert], dtype),
            dequantise_mxfp4(down[expert], down_scale[expert], dtype),
        )

    return of


@op(
    "mxfp4_experts(Tensor x, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, "
    "Tensor ids, Tensor weights, float? limit=None, Tensor? shared_gate_up=None, "
    "Tensor? shared_gate_up_scale=None, Tensor? shared_down=None, Tensor? shared_down_scale=None, "
    "bool fixed=False) -> Tensor",
    fake=fake_experts,
)
def mxfp4_experts(
    x: Tensor,  # float [..., H]
    gate_up: Tensor,  # uint8 [E, 2I, H / 2]  two e2m1 a byte, the low nibble first
    gate_up_scale: Tensor,  # uint8 [E, 2I, H / 32]  E8M0
    down: Tensor,  # uint8 [E, H, I / 2]
    down_scale: Tensor,  # uint8 [E, H, I / 32]
    ids: Tensor,  # int32 [..., top_k]  -1: of nobody
    weights: Tensor,  # float [..., top_k]
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,  # float8_e4m3fn [2J, H]
    shared_gate_up_scale: Tensor | None = None,  # float32 [2 * ceil(J / 128), ceil(H / 128)]
    shared_down: Tensor | None = None,  # float8_e4m3fn [H, J]
    shared_down_scale: Tensor | None = None,  # float32 [ceil(H / 128), ceil(J / 128)]
    fixed: bool = False,
) -> Tensor:  # [..., H]
    """`grouped_experts` over MXFP4 weights; with a limit, `clamped_experts`.

    A shared expert is in FP8, as `block_experts` takes it. `fixed`: kernels for a GPU keep one
    order of sums, whatever the number of tokens.
    """
    of = mxfp4_weights(gate_up, gate_up_scale, down, down_scale)
    shared = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return with_shared(sum_experts, x, gate_up.shape[0], of, ids, weights, limit, shared)
