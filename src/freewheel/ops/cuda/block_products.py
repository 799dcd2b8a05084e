# SPDX-License-Identifier: Apache-2.0
"""FP8 weights as the left operand of Hopper's matrix instructions, widened in registers.

From some ten tokens on, and up to a few hundred. Weights are loaded two at a time: the instruction
takes a row's numbers from a thread's registers in pairs, so a pair of codes becomes a pair of
bfloat16 without going through shared memory again, where only codes and tokens stand. Programs of
few registers and little shared memory run side by side on a multiprocessor, so that one's
widening hides behind another's product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freewheel.ops.cuda.chain import release, wait
from freewheel.ops.cuda.streaming import raw_fp8


@triton.jit
def widen_pairs(pairs, ASM: tl.constexpr):
    """uint16 [N, K] of two codes of e4m3 each, the first one low -> their values [N, 2K].

    bfloat16; without ASM float32.
    """
    if ASM:
        both = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 high, low, scale;
            shr.u32 high, $2, 4;
            shl.b32 low, $2, 4;
            and.b32 high, high, 0x07070707;
            and.b32 low, low, 0xf0f0f0f0;
            lop3.b32 high, $2, 0x80808080, high, 0xea;
            mov.b32 scale, 0x7b807b80;
            prmt.b32 $0, low, high, 0x5140;
            prmt.b32 $1, low, high, 0x7362;
            mul.bf16x2 $0, $0, scale;
            mul.bf16x2 $1, $1, scale;
            }
            """,
            "=&r,=&r,r",
            [pairs],
            dtype=tl.uint32,
            is_pure=True,
            pack=2,
        )
        # What follows takes no instruction: the register already holds both numbers.
        first = (both & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        second = (both >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        first = raw_fp8((pairs & 0xFF).to(tl.uint8), ASM)
        second = raw_fp8((pairs >> 8).to(tl.uint8), ASM)
    return tl.join(first, second).reshape(pairs.shape[0], 2 * pairs.shape[1])


@triton.jit
def block_products(
    x, pairs, scale, out, M, N, K, BLOCK_N, SHARE,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, tile of outputs, part): the products over SHARE inputs, into `out`.

    pairs uint16 [N, K / 2]. STEP divides K and SHARE; OUTPUTS divides BLOCK_N.
    """
    wait(CHAINED)
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k, half = tl.arange(0, STEP), tl.arange(0, STEP // 2)
    row = pairs + tl.minimum(n, N - 1).to(tl.int64) * (K // 2)
    x_at = x + m.to(tl.int64)[None, :] * K + k[:, None]
    scale_row = scale + tl.program_id(1) * OUTPUTS // BLOCK_N * (K // STEP)
    live = (m < M)[None, :]
    begin = tl.program_id(2) * SHARE
    pairs_at = row[:, None] + half[None, :]
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for at in tl.range(begin, tl.minimum(begin + SHARE, K), STEP, num_stages=STAGES):
        own = tl.load(pairs_at + at // 2)
        value = tl.load(x_at + at, mask=live, other=0)
        factor = tl.load(scale_row + at // STEP)
        value = value if ASM else value.to(tl.float32)
        total += tl.dot(widen_pairs(own, ASM), value, input_precision="ieee") * factor
    release(CHAINED)
    target = out + (tl.program_id(2) * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=live & (n < N)[:, None])
