# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary embedding and gating: one token's row, or one head's, is one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.parts import load_sum
from freewheel.ops.registry import SPECIFICATIONS, implement

ELEMENTS_A_WARP = 512


def warps_for(elements: int) -> int:
    """Warps for a program of so many elements, a power of two."""
    return min(16, max(1, triton.next_power_of_2(elements) // ELEMENTS_A_WARP))


@triton.jit
def _rms_norm(
    x, residual, weight, normed_out, sum_out, eps, D, pitch,
    ADD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """PARTS: of x, `pitch` apart, to be added up."""
    kind: tl.constexpr = normed_out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * D
    lane = tl.arange(0, BLOCK)
    inside = lane < D
    gain = tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    follow(CHAINED)
    wide = load_sum(x + row + lane, inside, pitch, kind, PARTS)
    if ADD:
        other = tl.load(residual + row + lane, mask=inside, other=0)
        value = (wide + other.to(tl.float32)).to(kind)
        tl.store(sum_out + row + lane, value, mask=inside)
        wide = value.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = wide * scale * gain
    tl.store(normed_out + row + lane, normed.to(kind), mask=inside)


def norm_of_parts(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of residual [..., D] and the sum of parts [P, tokens, D].

    Parts are float32, and their sum is rounded; or there is one, of residual's dtype.
    """
    return _run_rms_norm(parts, residual, weight, eps, True)


def _run_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, add: bool
) -> tuple[Tensor, Tensor]:
    """x as residual, or float32 parts of that."""
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(residual), torch.empty_like(residual) if add else x
    width = residual.shape[-1]
    block = triton.next_power_of_2(width)
    if residual.numel():
        _rms_norm[(residual.numel() // width,)](
            x, residual, weight, normed, total, eps, width, residual.numel(),
            ADD=add, PARTS=x.numel() // residual.numel(), BLOCK=block, CHAINED=CHAINED,
            num_warps=warps_for(block), launch_pdl=CHAINED,
        )  # fmt: skip
    return normed, total


@implement("rms_norm", "cuda")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float64:
        return SPECIFICATIONS["rms_norm"](x, weight, eps)
    return _run_rms_norm(x, x, weight, eps, False)[0]


@implement("add_rms_norm", "cuda")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return SPECIFICATIONS["add_rms_norm"](x, residual, weight, eps)
    return _run_rms_norm(x, residual, weight, eps, True)


@triton.jit
def _layer_norm(x, weight, bias, out, eps, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    lane = tl.arange(0, BLOCK)
    inside = lane < D
    value = tl.load(x + row + lane, mask=inside, other=0).to(tl.float32)
    apart = tl.where(inside, value - tl.sum(value, 0) / D, 0)
    scale = 1 / tl.sqrt(tl.sum(apart * apart, 0) / D + eps)
    gain = tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    offset = tl.load(bias + lane, mask=inside, other=0).to(tl.float32)
    normed = apart * scale * gain + offset
    tl.store(out + row + lane, normed.to(out.dtype.element_ty), mask=inside)


@implement("layer_norm", "cuda")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float64:
        return SPECIFICATIONS["layer_norm"](x, weight, bias, eps)
    x, width = x.contiguous(), x.shape[-1]
    out, block = torch.empty_like(x), triton.next_power_of_2(width)
    if x.numel():
        _layer_norm[(x.numel() // width,)](
            x, weight, bias, out, eps, width, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return out


@triton.jit
def _rope(
    x, positions, table, out, W, H, D, stride_b, stride_w, stride_h, stride_d, start,
    SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    batch, column = token // W, token % W
    source = x + batch.to(tl.int64) * stride_b + column.to(tl.int64) * stride_w + head * stride_h
    target = out + (token.to(tl.int64) * H + head) * D
    lane = tl.arange(0, BLOCK)
    apart = (lane < D) & ((lane < start) | (lane >= start + SPAN))
    tl.store(target + lane, tl.load(source + lane * stride_d, mask=apart), mask=apart)

    pair = tl.arange(0, HALF)
    live = pair < SPAN // 2
    first_at = start + (2 * pair if INTERLEAVED else pair)
    second_at = first_at + (1 if INTERLEAVED else SPAN // 2)
    angles = table + tl.load(positions + token).to(tl.int64) * SPAN
    cos = tl.load(angles + pair, mask=live, other=0)
    sin = tl.load(angles + SPAN // 2 + pair, mask=live, other=0)
    first = tl.load(source + first_at * stride_d, mask=live, other=0).to(tl.float32)
    second = tl.load(source + second_at * stride_d, mask=live, other=0).to(tl.float32)
    low, high = first * cos - second * sin, second * cos + first * sin
    tl.store(target + start + pair, low.to(out.dtype.element_ty), mask=live)
    tl.store(target + start + SPAN // 2 + pair, high.to(out.dtype.element_ty), mask=live)


@implement("rope", "cuda")
def rope(x: Tensor, positions: Tensor, rope_table: Tensor, start: int, interleaved: bool) -> Tensor:
    if x.dtype == torch.float64:
        return SPECIFICATIONS["rope"](x, positions, rope_table, start, interleaved)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (batch, width, heads, dim), span = x.shape, rope_table.shape[1]
    if x.numel():
        _rope[(batch * width, heads)](
            x, positions.contiguous(), rope_table, out, width, heads, dim, *x.stride(), start,
            SPAN=span, INTERLEAVED=interleaved, HALF=triton.next_power_of_2(span // 2),
            BLOCK=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _silu_mul(gate_up, out, total, INNER, BLOCK: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = lane < total
    source = gate_up + (lane // INNER) * 2 * INNER + lane % INNER
    gate = tl.load(source, mask=live, other=0).to(tl.float32)
    up = tl.load(source + INNER, mask=live, other=0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + lane, value.to(out.dtype.element_ty), mask=live)


@implement("silu_mul", "cuda")
def silu_mul(gate_up: Tensor) -> Tensor:
    if gate_up.dtype == torch.float64:
        return SPECIFICATIONS["silu_mul"](gate_up)
    gate_up = gate_up.contiguous()
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], inner))
    if out.numel():
        _silu_mul[(triton.cdiv(out.numel(), 1024),)](gate_up, out, out.numel(), inner, BLOCK=1024)
    return out
