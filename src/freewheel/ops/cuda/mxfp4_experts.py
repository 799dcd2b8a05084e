# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts over MXFP4 weights in the order of their checkpoint, in Triton.

It stands in where weights cannot be repacked (`repacked_experts`): on chips older than Hopper, for
float32, and for widths that are no multiple of 128. Tiles and launches are those of FP8 experts.

A byte holds two neighbouring inputs, so low and high nibbles meet even and odd activations in two
products and nothing is interleaved. The 32 inputs that
share a scale are one batch of the product, and its sum is scaled in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.block_experts import as_bytes, run_shared
from freewheel.ops.cuda.gating import gate
from freewheel.ops.cuda.quantised import uses_matrix_units
from freewheel.ops.cuda.quantised_experts import list_tiles, sum_choices
from freewheel.ops.cuda.streaming import operand
from freewheel.ops.registry import SPECIFICATIONS, implement

GROUPS = 4
"""Groups of 32 inputs that one warp takes at a time: their scales are the bytes of one word."""


class Tile(NamedTuple):
    """Of one program: outputs, warps (each takes inputs of its own), and loads ahead."""

    outputs: int
    slices: int
    stages: int


FEW = Tile(64, 2, 3), Tile(64, 1, 3)
SOME = Tile(32, 2, 3), Tile(32, 1, 3)
"""Of the gate and up projections (outputs are rows of both) and of the down one, by tokens."""


@triton.jit
def raw_fp4(codes, ASM: tl.constexpr):
    """uint8, two e2m1 a byte -> bfloat16 of 2^-126 times the low and the high ones' values.

    A value's sign, the first bit of its exponent and its other two bits are moved to where bfloat16
    has its sign, the last two bits of its exponent and the first of its mantissa. Without ASM:
    float32 of the values themselves.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, s;
            shl.b32 s, $4, 4;
            shr.u32 a, $4, 2;
            shl.b32 b, $4, 6;
            and.b32 a, a, 0x01010101;
            and.b32 b, b, 0xc0c0c0c0;
            lop3.b32 a, s, 0x80808080, a, 0xea;
            prmt.b32 $0, b, a, 0x5140;
            prmt.b32 $1, b, a, 0x7362;
            shr.u32 a, $4, 6;
            shl.b32 b, $4, 2;
            and.b32 a, a, 0x01010101;
            and.b32 b, b, 0xc0c0c0c0;
            lop3.b32 a, $4, 0x80808080, a, 0xea;
            prmt.b32 $2, b, a, 0x5140;
            prmt.b32 $3, b, a, 0x7362;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.uint32)
        low = ((wide & 8) << 28) | ((wide & 7) << 22)
        high = ((wide & 0x80) << 24) | ((wide & 0x70) << 18)
        power = 8.507059173023462e37  # 2^126
        return (
            low.to(tl.float32, bitcast=True) * power,
            high.to(tl.float32, bitcast=True) * power,
        )


@triton.jit
def true_fp4(total, ASM: tl.constexpr):
    """The sum of products of `raw_fp4` and `pairs_at`, times what they lack: 2^(126 - 50)."""
    if ASM:
        return total * 7.555786372591432e22
    else:
        return total


@triton.jit
def pairs_at(x, at, mask, ASM: tl.constexpr):
    """Activations 2 * at and 2 * at + 1 of the rows at `x`, where the mask holds, else 0.

    As `operand` gives them.
    """
    if ASM:
        words = tl.load(x + at, mask=mask, other=0)  # two bfloat16 a word
        even = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        odd = (words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return operand(even, ASM), operand(odd, ASM)
    else:
        even = tl.load(x + 2 * at, mask=mask, other=0)
        odd = tl.load(x + 2 * at + 1, mask=mask, other=0)
        return operand(even, ASM), operand(odd, ASM)


@triton.jit
def decode_scale(code):
    """float32 2^(code - 127) of E8M0 codes; infinity for the code of NaN, which no weight has."""
    return tl.maximum((code.to(tl.int32) & 0xFF) << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def few_tokens_fp4(
    weight, x, live, scale, K,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, SLICES: tl.constexpr, GROUPS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """float32 [OUTPUTS, TOKENS]: rows at `weight` times rows at `x`, over K inputs.

    weight, scale [OUTPUTS]: pointers to the first byte of a row. x [TOKENS]: to its first word of
    two bfloat16 with ASM, else to its first element. EVEN: 32 * SLICES * GROUPS divides K.
    """
    batch: tl.constexpr = SLICES * GROUPS  # products side by side, each of 32 inputs
    group, byte = tl.arange(0, batch), tl.arange(0, 16)
    place = group[:, None] * 16 + byte[None, :]
    codes_at = weight[None, :, None] + place[:, None, :]
    scale_at = scale[None, :] + group[:, None]
    words_at = scale.to(tl.pointer_type(tl.int32), bitcast=True)[None, :]
    words_at += tl.arange(0, SLICES)[:, None]
    total = tl.zeros((batch, OUTPUTS, TOKENS), tl.float32)
    for at in tl.range(0, K // 32, batch, num_stages=STAGES):
        lanes = live[None, None, :]
        if EVEN:
            codes = tl.load(codes_at + at * 16)
            words = tl.load(words_at + at // GROUPS)  # a byte a group
            spread = tl.broadcast_to(words[:, None, :], (SLICES, GROUPS, OUTPUTS))
            factor = spread.reshape((batch, OUTPUTS)) >> (group % GROUPS * 8)[:, None]
        else:
            inside = at + group < K // 32
            lanes = lanes & inside[:, None, None]
            codes = tl.load(codes_at + at * 16, mask=inside[:, None, None], other=0)
            factor = tl.load(scale_at + at, mask=inside[:, None], other=127)
        even, odd = pairs_at(x[None, None, :], at * 16 + place[:, :, None], lanes, ASM)
        low, high = raw_fp4(codes, ASM)
        both = tl.dot(low, even, input_precision="ieee")
        both = tl.dot(high, odd, both, input_precision="ieee")
        total += both * decode_scale(factor)[:, :, None]
    return true_fp4(tl.sum(total, 0), ASM)


@triton.jit
def _gate_up(
    x, weight, scale, experts, lanes, inner, limit, TOP_K, H, INNER, X_ROW,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr, GROUPS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, CLAMP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    pair = tl.load(lanes + tile * TOKENS + tl.arange(0, TOKENS))
    if expert >= 0:
        live = pair >= 0
        row = tl.arange(0, OUTPUTS)  # gate and up of the same output lie side by side
        n = tl.minimum(tl.program_id(0) * (OUTPUTS // 2) + row // 2, INNER - 1)
        line = (expert * 2 + row % 2) * INNER + n
        total = few_tokens_fp4(
            weight + line * (H // 2), x + (pair // TOP_K).to(tl.int64) * X_ROW, live,
            scale + line * (H // 32), H, OUTPUTS, TOKENS, SLICES, GROUPS, STAGES,
            EVEN, ASM,
        )  # fmt: skip
        sides = total.reshape((OUTPUTS // 2, 2, TOKENS)).permute((0, 2, 1))
        gate_value, up_value = tl.split(sides)
        value = gate(gate_value, up_value, limit, CLAMP)
        at = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        target = inner + pair.to(tl.int64)[None, :] * INNER + at[:, None]
        mask = live[None, :] & (at < INNER)[:, None]
        tl.store(target, value.to(inner.dtype.element_ty), mask=mask)


@triton.jit
def _down(
    inner, weight, scale, experts, lanes, shares, parts, H, INNER, X_ROW,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr, GROUPS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    pair = tl.load(lanes + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    if expert >= 0:
        live = pair >= 0
        at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        line = expert * H + tl.minimum(at, H - 1)
        share = tl.load(shares + pair, mask=live, other=0).to(tl.float32)
        total = few_tokens_fp4(
            weight + line * (INNER // 2), inner + pair * X_ROW, live,
            scale + line * (INNER // 32), INNER, OUTPUTS, TOKENS, SLICES, GROUPS, STAGES,
            EVEN, ASM,
        )  # fmt: skip
        target = parts + pair[None, :] * H + at[:, None]
        tl.store(target, total * share[None, :], mask=live[None, :] & (at < H)[:, None])


def tokens_for(pairs: int, experts: int) -> int:
    """Pairs of one tile, by how many an expert has when they spread evenly."""
    if pairs <= 4 * experts:
        return 8
    return 16 if pairs <= 16 * experts else 32


Packed = tuple[Tensor, Tensor]
"""Codes and scales."""


@implement("mxfp4_experts", "cuda")
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
    shared = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    if x.dtype not in (torch.bfloat16, torch.float32):
        given = (x, gate_up, gate_up_scale, down, down_scale, ids, weights, limit)
        return SPECIFICATIONS["mxfp4_experts"](*given, *shared)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    own, behind = ((gate_up, gate_up_scale), (down, down_scale)), as_bytes(*shared)
    if not x.numel():
        return torch.empty_like(x)
    out = tiled_experts(x, *own, ids, weights, limit, fixed)
    return out if behind is None else out + run_shared(x, behind, limit, fixed)


def tiled_experts(
    x: Tensor,
    up: Packed,
    low: Packed,
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
    fixed: bool,
) -> Tensor:
    """Of bfloat16 or float32 and any width, without a shared one."""
    (gate_up, gate_up_scale), (down, down_scale) = up, low
    experts, hidden, width, top_k = *down.shape[:2], 2 * down.shape[2], ids.shape[-1]
    out, pairs, fast = torch.empty_like(x), ids.numel(), uses_matrix_units(x)
    tokens = 8 if fixed else tokens_for(pairs, experts)
    first, second = FEW if tokens == 8 else SOME
    plan = list_tiles(ids, experts, tokens)
    inner = x.new_empty((pairs, width))
    parts = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
    tiles = plan.experts.shape[0]
    _gate_up[(triton.cdiv(width, first.outputs // 2), tiles)](
        as_words(x, fast), gate_up, gate_up_scale, *plan, inner, 0.0 if limit is None else limit,
        top_k, hidden, width, hidden // 2 if fast else hidden,
        TOKENS=tokens, OUTPUTS=first.outputs, SLICES=first.slices, GROUPS=GROUPS,
        STAGES=first.stages, EVEN=hidden % (32 * GROUPS * first.slices) == 0,
        CLAMP=limit is not None, ASM=fast, num_warps=first.slices,
    )  # fmt: skip
    _down[(triton.cdiv(hidden, second.outputs), tiles)](
        as_words(inner, fast), down, down_scale, *plan, weights, parts, hidden, width,
        width // 2 if fast else width,
        TOKENS=tokens, OUTPUTS=second.outputs, SLICES=second.slices, GROUPS=GROUPS,
        STAGES=second.stages, EVEN=width % (32 * GROUPS * second.slices) == 0, ASM=fast,
        num_warps=second.slices,
    )  # fmt: skip
    sum_choices(parts, ids, out)
    return out


def as_words(x: Tensor, fast: bool) -> Tensor:
    """bfloat16 [..., D] as int32 [..., D / 2], so that an even and an odd input are one load."""
    return x.view(torch.int32) if fast else x
