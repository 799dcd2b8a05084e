# SPDX-License-Identifier: Apache-2.0
"""float32 projections of bfloat16 tokens by matrix units, as precise as float32.

A float32 weight is the sum of three bfloat16 numbers, to its last bit: its upper half, the upper
half of what is missing, and the same again. Their products with a bfloat16 token are exact in
float32, where the matrix units add them up. So three products do what a float32 one does, without
rounding a weight; the order of the sum is fixed by the shapes. (Of a weight below 2^-110 the last
bits are lost, and an infinite one gives NaN.)

Programs share the inputs among themselves (`parts`): such weights have few outputs.

Error: measured, 3e-7 of the largest result over 7,168 inputs; the library's float32 product, 3e-7.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, release, wait
from freewheel.ops.cuda.parts import add_parts

OUTPUTS, STEP, STAGES = 64, 64, 4
"""Of one program; inputs at a time; loads ahead."""

FEW_TOKENS, MOST_HELD = 16, 4
"""Where sums keep one order, tokens up to which weights wait for them; so many steps at most."""

MOST_ROWS, SHARE, MOST = 64, 256, 528
"""Tokens and inputs of one program; programs beyond which inputs are shared among fewer."""


class Tile(NamedTuple):
    """Tokens and outputs of one program, inputs at a time, warps, loads ahead, inputs in all."""

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    share: int


@triton.jit
def thirds(weight):
    """float32 -> three bfloat16 that add up to it: of each, the bits above are cut off."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        prmt.b32 $0, $3, $4, 0x7632;
        and.b32 a, $3, 0xffff0000;
        and.b32 b, $4, 0xffff0000;
        sub.rn.f32 a, $3, a;
        sub.rn.f32 b, $4, b;
        prmt.b32 $1, a, b, 0x7632;
        .reg .b32 c, d;
        and.b32 c, a, 0xffff0000;
        and.b32 d, b, 0xffff0000;
        sub.rn.f32 a, a, c;
        sub.rn.f32 b, b, d;
        prmt.b32 $2, a, b, 0x7632;
        }
        """,
        "=&r,=&r,=&r,r,r",
        [weight],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _add_step(total, own, value, FAST: tl.constexpr):
    """`total` and the products of own [OUTPUTS, STEP] and value [STEP, TOKENS]."""
    if FAST:
        high, middle, low = thirds(own)
        # The units cut off what lies below their sum's last bit: it is kept short.
        return total + tl.dot(high, value, tl.dot(middle, value, tl.dot(low, value)))
    else:
        return tl.dot(own, value.to(tl.float32), total, input_precision="ieee")


@triton.jit
def _add_held(
    total, weight_at, x_at, k, live, begin, end,
    STEP: tl.constexpr, HELD: tl.constexpr, FAST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """All HELD steps, whose weights are on their way before it waits for the kernel in front."""
    held = ()
    for nth in tl.static_range(HELD):
        inside = begin + nth * STEP + k < end
        held = held + (tl.load(weight_at + begin + nth * STEP, mask=inside[None, :], other=0),)
    wait(CHAINED)
    for nth in tl.static_range(HELD):
        inside = begin + nth * STEP + k < end
        value = tl.load(x_at + begin + nth * STEP, mask=live & inside[:, None], other=0)
        total = _add_step(total, held[nth], value, FAST)
    return total


@triton.jit
def _wide_products(
    x, weight, out, M, N, K, SHARE,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    HELD: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """HELD: how many times STEP inputs wait in registers for their tokens: all, or none."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, STEP)
    weight_at = weight + tl.minimum(n, N - 1)[:, None] * K + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * K + k[:, None]
    live = (m < M)[None, :]
    begin = tl.program_id(2) * SHARE
    end = tl.minimum(begin + SHARE, K)
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    if HELD:
        total = _add_held(
            total, weight_at, x_at, k, live, begin, end, STEP, HELD, FAST, CHAINED
        )  # fmt: skip
    else:
        wait(CHAINED)
        for at in tl.range(begin, end, STEP, num_stages=STAGES):
            if EVEN:
                own = tl.load(weight_at + at)
                value = tl.load(x_at + at, mask=live, other=0)
            else:
                inside = at + k < end
                own = tl.load(weight_at + at, mask=inside[None, :], other=0)
                value = tl.load(x_at + at, mask=live & inside[:, None], other=0)
            total = _add_step(total, own, value, FAST)
    release(CHAINED)
    target = out + (tl.program_id(2) * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(target, total, mask=live & (n < N)[:, None])


def tile_for(tokens: int, outputs: int, inputs: int, fixed: bool = False) -> Tile:
    """By shapes alone, which a captured graph holds fixed. `fixed`: inputs are shared out by the
    weight's alone."""
    rows = min(MOST_ROWS, max(16, triton.next_power_of_2(tokens)))
    tiles = (1 if fixed else triton.cdiv(tokens, rows)) * triton.cdiv(outputs, OUTPUTS)
    parts = max(1, min(triton.cdiv(inputs, SHARE), MOST // tiles))
    share = triton.cdiv(triton.cdiv(inputs, STEP), parts) * STEP
    return Tile(rows, OUTPUTS, STEP, 4, STAGES, share)


def wide_products(
    x: Tensor, weight: Tensor, tile: Tile | None = None, fixed: bool = False
) -> Tensor:
    """`wide_linear` of bfloat16 x [..., I], not empty, and float32 weight [O, I]: [..., O]."""
    parts = wide_parts(x, weight, tile, fixed)
    out = parts[0] if len(parts) == 1 else add_parts(parts, torch.empty_like(parts[0]))
    return out.view(*x.shape[:-1], len(weight))


def wide_parts(x: Tensor, weight: Tensor, tile: Tile | None = None, fixed: bool = False) -> Tensor:
    """float32 [P, tokens, O]: parts that add up to `wide_products`."""
    outputs, inputs = weight.shape
    tokens = x.numel() // inputs
    tile = tile or tile_for(tokens, outputs, inputs, fixed)
    parts = triton.cdiv(inputs, tile.share)
    room = weight.new_empty((parts, tokens, outputs))
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(tokens, tile.tokens), parts)
    steps = triton.cdiv(tile.share, tile.inputs)
    held = steps if fixed and tokens <= FEW_TOKENS and steps <= MOST_HELD else 0
    _wide_products[grid](
        x.contiguous(), weight, room, tokens, outputs, inputs, tile.share, TOKENS=tile.tokens,
        OUTPUTS=tile.outputs, STEP=tile.inputs, STAGES=tile.stages, HELD=held,
        EVEN=inputs % tile.inputs == 0, FAST=x.is_cuda, CHAINED=CHAINED, num_warps=tile.warps,
        launch_pdl=CHAINED,
    )  # fmt: skip
    return room
