# SPDX-License-Identifier: Apache-2.0
"""The inner loops over FP8 weights that all kernels of quantised weights share.

Weights cross memory as bytes and become bfloat16 in registers, exactly; products are summed in
float32 and each block's sum is multiplied by its scale. Codes of NaN do not occur in a checkpoint
that `convert` or a trainer wrote; here they would read as 480.

Few tokens: the weight is the left operand, so eight tokens fill a matrix instruction, and every
warp takes its own blocks of inputs, so that a program of a few outputs still has many loads ahead.
Many tokens: the weight is the right operand of the large matrix instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen_fp8(codes, ASM: tl.constexpr):
    """uint8 codes of e4m3 -> bfloat16 (float32 without ASM): the bits moved, times 2^120."""
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, a, b, power;
            mov.b32 power, 0x7b807b80;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.u32 a, low, 4;
            shr.u32 b, high, 4;
            and.b32 a, a, 0x07f007f0;
            and.b32 b, b, 0x07f007f0;
            lop3.b32 low, low, 0x80008000, a, 0xea;
            lop3.b32 high, high, 0x80008000, b, 0xea;
            mul.rn.bf16x2 $0, low, power;
            mul.rn.bf16x2 $1, high, power;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.uint32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def operand(x, ASM: tl.constexpr):
    """Activations in the dtype that `widen_fp8` gives."""
    return x if ASM else x.to(tl.float32)


@triton.jit
def few_tokens(
    weight, x, live, scale, K,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """float32 [OUTPUTS, TOKENS]: rows at `weight` times rows at `x`, over K inputs.

    weight [OUTPUTS], x [TOKENS], scale [OUTPUTS]: pointers to the first element of a row. A block
    of scales spans STEP inputs. EVEN: STEP * SLICES divides K.
    """
    k, part = tl.arange(0, STEP), tl.arange(0, SLICES)
    place = part[:, None] * STEP + k[None, :]
    codes_at = weight[None, :, None] + place[:, None, :]
    x_at = x[None, None, :] + place[:, :, None]
    scale_at = scale[None, :] + part[:, None]
    total = tl.zeros((SLICES, OUTPUTS, TOKENS), tl.float32)
    for at in tl.range(0, K, STEP * SLICES, num_stages=STAGES):
        if EVEN:
            codes = tl.load(codes_at + at)
            value = tl.load(x_at + at, mask=live[None, None, :], other=0)
            factor = tl.load(scale_at + at // STEP)
        else:
            inside = at + place < K
            codes = tl.load(codes_at + at, mask=inside[:, None, :], other=0)
            value = tl.load(x_at + at, mask=inside[:, :, None] & live[None, None, :], other=0)
            factor = tl.load(scale_at + at // STEP, mask=(at + part * STEP < K)[:, None], other=0)
        both = tl.dot(widen_fp8(codes, ASM), operand(value, ASM), input_precision="ieee")
        total += both * factor[:, :, None]
    return tl.sum(total, 0)


@triton.jit
def many_tokens(
    weight, x, live, scale, K,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    ONE_SCALE: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """float32 [TOKENS, OUTPUTS], else as `few_tokens` with one slice.

    ONE_SCALE: all outputs lie in the same blocks, and `scale` is one pointer.
    """
    k = tl.arange(0, STEP)
    codes_at = weight[None, :] + k[:, None]
    x_at = x[:, None] + k[None, :]
    total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for at in tl.range(0, K, STEP, num_stages=STAGES):
        if EVEN:
            codes = tl.load(codes_at + at)
            value = tl.load(x_at + at, mask=live[:, None], other=0)
        else:
            inside = at + k < K
            codes = tl.load(codes_at + at, mask=inside[:, None], other=0)
            value = tl.load(x_at + at, mask=inside[None, :] & live[:, None], other=0)
        factor = tl.load(scale + at // STEP)
        both = tl.dot(operand(value, ASM), widen_fp8(codes, ASM), input_precision="ieee")
        if ONE_SCALE:
            total += both * factor
        else:
            total += both * factor[None, :]
    return total
