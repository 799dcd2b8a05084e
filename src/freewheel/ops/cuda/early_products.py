# SPDX-License-Identifier: Apache-2.0
"""FP8 projections of 17 to a few hundred tokens on Hopper, with layouts and waits written out.

A program multiplies 128 outputs by all tokens of a tile, so that weights are widened once and
tokens, which come from the L2 cache, are read by few programs. While the matrix units multiply one
block of 128 inputs, the codes of the next one are widened in registers, where the instruction takes
its left operand. The first blocks' codes are asked for before the kernel in front has ended.

Codes are read from shared memory two at a time, see `block_products`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from freewheel.ops.cuda.explicit import barrier, release, wait

PROGRAMS = 132
"""That run at once on an H200, one on a multiprocessor."""

BLOCK = 128
"""Outputs of a program, and inputs that a scale covers."""


class EarlyTile(NamedTuple):
    """Tokens of a program, buffers of tokens and of codes, programs that share an output."""

    tokens: int
    stages: int
    codes: int
    parts: int


def early_tile(tokens: int, outputs: int, inputs: int) -> EarlyTile:
    """By the weight's shape, but for a program's tokens and its buffers."""
    tiles, blocks = triton.cdiv(outputs, BLOCK), triton.cdiv(inputs, BLOCK)
    parts = max(1, min(PROGRAMS // tiles, blocks // 4))
    if tokens <= 32:
        return EarlyTile(16 if tokens <= 16 else 32, 4, 4, parts)
    if tokens <= 64:
        return EarlyTile(64, 4, 6, parts)
    return EarlyTile(128, 4, 4, parts)


def serves(x: Tensor, inputs: int, block_n: int, block_k: int) -> bool:
    """Whether this kernel is for such a projection: its instructions are Hopper's."""
    fits = x.is_cuda and x.dtype == torch.bfloat16
    fits = fits and block_k == BLOCK and block_n % BLOCK == 0 and inputs % BLOCK == 0
    return fits and torch.cuda.get_device_capability(x.device)[0] == 9


COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
# Each store of a warp fills whole sectors of 32 bytes.
STORES = gl.constexpr(gl.BlockedLayout([8, 1], [16, 2], [1, 8], [0, 1]))
WIDE_STORES = gl.constexpr(gl.BlockedLayout([4, 1], [32, 1], [1, 8], [0, 1]))
CODES_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def _raw(pairs):
    """uint16 [N, K] of two codes of e4m3 each, the first one low -> uint32 [N, K].

    Of two bfloat16 each: 2^-120 of their values.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 high, low;
        shr.u32 high, $2, 4;
        shl.b32 low, $2, 4;
        and.b32 high, high, 0x07070707;
        and.b32 low, low, 0xf0f0f0f0;
        lop3.b32 high, $2, 0x80808080, high, 0xea;
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
        }
        """,
        "=&r,=&r,r", [pairs], dtype=gl.uint32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _widen(raw, layout: gl.constexpr):
    """bfloat16 [N, 2K]: the values of what `_raw` gives."""
    both = gl.inline_asm_elementwise(
        "{ .reg .b32 scale; mov.b32 scale, 0x7b807b80; mul.bf16x2 $0, $1, scale; }",
        "=r,r", [raw], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
    first = (both & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    second = (both >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    wide = gl.join(first, second).reshape([raw.shape[0], 2 * raw.shape[1]])
    return gl.convert_layout(wide, layout, assert_trivial=True)


@gluon.jit
def _fetch(buffer, at, step, steps, WIDTH: gl.constexpr, live):
    """Start copying a step's WIDTH columns, of rows that are live, if there is such a step."""
    there = live[:, None] & (step < steps)
    async_copy.async_copy_global_to_shared(buffer, at + step * WIDTH, mask=there)


@gluon.jit
def _leave(total, out, part, m0, n0, M, N, TOKENS: gl.constexpr):
    """Store float32 [128, TOKENS] at token m0 and output n0 of `part`."""
    wide: gl.constexpr = out.dtype.element_ty.primitive_bitwidth == 32
    layout: gl.constexpr = WIDE_STORES if wide else STORES
    value = gl.convert_layout(total.to(out.dtype.element_ty), layout)
    n = n0 + gl.arange(0, 128, gl.SliceLayout(1, layout))
    m = m0 + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    target = out + (part * M + m).to(gl.int64)[None, :] * N + n[:, None]
    gl.store(target, value, mask=(m < M)[None, :] & (n < N)[:, None])


@gluon.jit
def _multiply(
    codes, values, codes_at, x_at, factor_at, row, live, steps, mma: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, CODES: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """float32 [128, TOKENS]: the sum over all steps, of which the first are on their way."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    left_pairs: gl.constexpr = gl.DotOperandLayout(0, mma, 1)
    factor, last_fetch = gl.load(factor_at), gl.maximum(steps - STAGES, 0)
    zero = gl.zeros([128, TOKENS], gl.float32, mma)
    total = zero
    async_copy.wait_group(STAGES - 2)
    barrier()
    weight = _widen(_raw(codes.index(0).load(left_pairs)), left)
    at, free, code_at, code_free = 0, STAGES - 1, 1, 0
    for nth in range(steps):
        part_sum = warpgroup_mma(
            weight, values.index(at).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        next_factor = gl.load(factor_at + nth + 1, mask=nth + 1 < steps, other=0.0)
        # What the next step reads has come for all threads, and all are done with the last one's.
        async_copy.wait_group(STAGES - 3)
        barrier()
        fresh = codes.index(code_at).load(left_pairs)
        _fetch(values.index(free), x_at, nth + STAGES - 1, steps, 128, live)
        _fetch(codes.index(code_free), codes_at, nth + CODES, steps, 64, row >= 0)
        async_copy.commit_group()
        if nth == last_fetch:
            release(CHAINED)
        # The last step of widening waits: the compiler lets no product run beside an instruction
        # that sets the operand of another.
        part_sum, raw = warpgroup_mma_wait(0, deps=(part_sum, _raw(fresh)))
        total += part_sum * factor
        weight, factor = _widen(raw, left), next_factor
        at = gl.where(at == STAGES - 1, 0, at + 1)
        free = gl.where(free == STAGES - 1, 0, free + 1)
        code_free = gl.where(code_free == CODES - 1, 0, code_free + 1)
        code_at = gl.where(code_at == CODES - 1, 0, code_at + 1)
    return total


@gluon.jit
def early_products(
    x, pairs, scale, out, M, N, HALF, BLOCK_N, SHARE,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, CODES: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, part, tile of tokens): products over SHARE blocks, into `out`.

    pairs uint16 [N, HALF]; HALF: half of the inputs.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, TOKENS, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], gl.bfloat16)
    codes = gl.allocate_shared_memory(gl.uint16, [CODES, 128, 64], CODES_SHARED)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, 128], shared)

    n0, m0, part = gl.program_id(0) * 128, gl.program_id(2) * TOKENS, gl.program_id(1)
    first = part * SHARE
    steps = gl.minimum(SHARE, HALF // 64 - first)
    row = gl.minimum(n0 + gl.arange(0, 128, gl.SliceLayout(1, COPIES)), N - 1)
    c = gl.arange(0, 64, gl.SliceLayout(0, COPIES))
    codes_at = pairs + row.to(gl.int64)[:, None] * HALF + (first * 64 + c)[None, :]
    for nth in gl.static_range(CODES):
        _fetch(codes.index(nth), codes_at, nth, steps, 64, row >= 0)
        async_copy.commit_group()
    factor_at = scale + n0 // BLOCK_N * (HALF // 64) + first
    wait(CHAINED)
    m = m0 + gl.arange(0, TOKENS, gl.SliceLayout(1, COPIES))
    k = gl.arange(0, 128, gl.SliceLayout(0, COPIES))
    live = m < M
    x_at = x + m.to(gl.int64)[:, None] * (2 * HALF) + (first * 128 + k)[None, :]
    for nth in gl.static_range(STAGES - 1):
        _fetch(values.index(nth), x_at, nth, steps, 128, live)
        async_copy.commit_group()
    total = _multiply(
        codes, values, codes_at, x_at, factor_at, row, live, steps, mma, TOKENS, STAGES, CODES,
        CHAINED,
    )  # fmt: skip
    _leave(total, out, part, m0, n0, M, N, TOKENS)
