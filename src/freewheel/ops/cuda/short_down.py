# SPDX-License-Identifier: Apache-2.0
"""A down projection of few inputs: a warp keeps its tokens and runs along the outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from freewheel.ops.cuda.streaming import operand, raw_fp8, true_fp8

MOST_BLOCKS = 4
"""Blocks of inputs that a warp takes at once."""


@triton.jit
def short_down(
    x, weight, width, scale, pitch, out, live, share, H, INNER,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr, ROUNDS: tl.constexpr,
    STAGES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program 0's number of ROUNDS tiles of OUTPUTS, each while the next tile's weights come in.

    x, out [TOKENS]: pointers to rows of INNER inputs, and of H outputs in float32, where `live`;
    share float32 [TOKENS]: a factor of each. weight, scale: pointers to an expert's first elements;
    their rows are `width` and `pitch` apart. INNER is at most STEP * SLICES; EVEN: it is that.
    """
    k, part = tl.arange(0, STEP), tl.arange(0, SLICES)
    place = part[:, None] * STEP + k[None, :]
    inside = place < INNER
    there = inside[:, :, None] & live[None, None, :]
    value = tl.load(x[None, None, :] + place[:, :, None], mask=there, other=0)
    first = tl.program_id(0) * ROUNDS * OUTPUTS + tl.arange(0, OUTPUTS)
    codes_at, scale_at = weight + place[:, None, :], scale + part[:, None]
    for nth in tl.range(0, ROUNDS, num_stages=STAGES):
        at = first + nth * OUTPUTS
        n = tl.minimum(at, H - 1)
        row_at, factor_at = (n * width)[None, :, None], (n // STEP * pitch)[None, :]
        if EVEN:
            codes = tl.load(codes_at + row_at)
            factor = tl.load(scale_at + factor_at)
        else:
            codes = tl.load(codes_at + row_at, mask=inside[:, None, :], other=0)
            factor = tl.load(scale_at + factor_at, mask=(part * STEP < INNER)[:, None], other=0)
        both = tl.dot(raw_fp8(codes, ASM), operand(value, ASM), input_precision="ieee")
        total = true_fp8(tl.sum(both * factor[:, :, None], 0), ASM) * share[None, :]
        tl.store(out[None, :] + at[:, None], total, mask=live[None, :] & (at < H)[:, None])
