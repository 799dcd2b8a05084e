# SPDX-License-Identifier: Apache-2.0
"""A down projection of few inputs: a warp keeps its tokens and runs along the outputs.

Its first weights are on their way before it has tokens: `hold_first` is called in front of the wait
for the kernel that makes them, and `short_down` behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freewheel.ops.cuda.streaming import operand, raw_fp8, true_fp8

MOST_BLOCKS = 4
"""Blocks of inputs that a warp takes at once."""


@triton.jit
def _load_tile(
    weight, width, scale, pitch, nth, H, INNER,
    OUTPUTS: tl.constexpr, SLICES: tl.constexpr, ROUNDS: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """(codes [SLICES, OUTPUTS, STEP], scales [SLICES, OUTPUTS]) of the program's tile `nth`."""
    k, part = tl.arange(0, STEP), tl.arange(0, SLICES)
    place = part[:, None] * STEP + k[None, :]
    at = (tl.program_id(0) * ROUNDS + nth) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.minimum(at, H - 1)
    codes_at = weight + place[:, None, :] + (n * width)[None, :, None]
    scale_at = scale + part[:, None] + (n // STEP * pitch)[None, :]
    if EVEN:
        codes, factor = tl.load(codes_at), tl.load(scale_at)
    else:
        codes = tl.load(codes_at, mask=(place < INNER)[:, None, :], other=0)
        factor = tl.load(scale_at, mask=(part * STEP < INNER)[:, None], other=0)
    return codes, factor


@triton.jit
def hold_first(
    weight, width, scale, pitch, H, INNER,
    OUTPUTS: tl.constexpr, SLICES: tl.constexpr, ROUNDS: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The first tile's weights and scales, for `short_down`, whose arguments these are."""
    return _load_tile(
        weight, width, scale, pitch, 0, H, INNER, OUTPUTS, SLICES, ROUNDS, STEP, EVEN
    )  # fmt: skip


@triton.jit
def _project_tile(
    value, codes, factor, out, live, share, nth, H,
    OUTPUTS: tl.constexpr, ROUNDS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    at = (tl.program_id(0) * ROUNDS + nth) * OUTPUTS + tl.arange(0, OUTPUTS)
    both = tl.dot(raw_fp8(codes, ASM), operand(value, ASM), input_precision="ieee")
    total = true_fp8(tl.sum(both * factor[:, :, None], 0), ASM) * share[None, :]
    tl.store(out[None, :] + at[:, None], total, mask=live[None, :] & (at < H)[:, None])


@triton.jit
def short_down(
    x, weight, width, scale, pitch, out, live, share, codes, factor, H, INNER,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr, ROUNDS: tl.constexpr,
    STAGES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program 0's number of ROUNDS tiles of OUTPUTS, each while the next tile's weights come in.

    x, out [TOKENS]: pointers to rows of INNER inputs, and of H outputs in float32, where `live`;
    share float32 [TOKENS]: a factor of each. weight, scale: pointers to an expert's first elements;
    their rows are `width` and `pitch` apart. codes, factor: what `hold_first` gave. INNER is at
    most STEP * SLICES; EVEN: it is that.
    """
    k, part = tl.arange(0, STEP), tl.arange(0, SLICES)
    place = part[:, None] * STEP + k[None, :]
    there = (place < INNER)[:, :, None] & live[None, None, :]
    value = tl.load(x[None, None, :] + place[:, :, None], mask=there, other=0)
    _project_tile(value, codes, factor, out, live, share, 0, H, OUTPUTS, ROUNDS, ASM)
    for nth in tl.range(1, ROUNDS, num_stages=STAGES):
        codes, factor = _load_tile(
            weight, width, scale, pitch, nth, H, INNER, OUTPUTS, SLICES, ROUNDS, STEP, EVEN
        )  # fmt: skip
        _project_tile(value, codes, factor, out, live, share, nth, H, OUTPUTS, ROUNDS, ASM)
