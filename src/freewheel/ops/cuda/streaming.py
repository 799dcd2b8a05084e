# SPDX-License-Identifier: Apache-2.0
"""The inner loops over FP8 weights that all kernels of quantised weights share.

Weights cross memory as bytes and become bfloat16 in registers, exactly; products are summed in
float32 and each block's sum is multiplied by its scale. At these rates it is instructions an
element that count, not only bytes: see `raw_fp8`. Codes of NaN do not occur in a checkpoint
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
    """uint8 codes of e4m3 -> their values as bfloat16; without ASM as `raw_fp8`, in float32."""
    if ASM:
        return raw_fp8(codes, ASM) * tl.full((), 2.0**120, tl.bfloat16)
    else:
        return raw_fp8(codes, ASM)


@triton.jit
def widen_once(codes, ASM: tl.constexpr):
    """As `widen_fp8`, for numbers that two products take.

    What has side effects, as this is said to have, Triton neither repeats for each product nor
    moves behind a change of layout, where codes would be read one byte at a time.
    """
    if ASM:
        wide = tl.inline_asm_elementwise(
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
            "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=False, pack=4,
        )  # fmt: skip
        return wide * tl.full((), 2.0**120, tl.bfloat16)
    else:
        return raw_fp8(codes, ASM)


@triton.jit
def raw_fp8(codes, ASM: tl.constexpr):
    """uint8 codes of e4m3 -> bfloat16 of 2^-120 times their values: the bits moved, no more.

    Without ASM: float32 of the values themselves.
    """
    if ASM:
        return tl.inline_asm_elementwise(
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
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.uint32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def operand(x, ASM: tl.constexpr):
    """Activations to meet raw weights: times 2^50, which keeps their products far from subnormal.

    Exact below 2^78; beyond, the result is infinite. Without ASM: float32, as they are.
    """
    if ASM:
        return x * tl.full((), 2.0**50, tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def true_fp8(total, ASM: tl.constexpr):
    """The sum of products of `raw_fp8` and `operand`, times what they lack: 2^(120 - 50)."""
    if ASM:
        return total * 1.180591620717411e21
    else:
        return total


@triton.jit
def few_tokens(
    weight, x, live, scale, begin, end,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """float32 [OUTPUTS, TOKENS]: rows at `weight` times rows at `x`, over inputs begin to end.

    weight [OUTPUTS], x [TOKENS], scale [OUTPUTS]: pointers to the first element of a row. A block
    of scales spans STEP inputs, and `begin` is where one begins. EVEN: STEP * SLICES divides
    end - begin.
    """
    k, part = tl.arange(0, STEP), tl.arange(0, SLICES)
    place = part[:, None] * STEP + k[None, :]
    codes_at = weight[None, :, None] + place[:, None, :]
    x_at = x[None, None, :] + place[:, :, None]
    scale_at = scale[None, :] + part[:, None]
    total = tl.zeros((SLICES, OUTPUTS, TOKENS), tl.float32)
    for at in tl.range(begin, end, STEP * SLICES, num_stages=STAGES):
        if EVEN:
            codes = tl.load(codes_at + at)
            value = tl.load(x_at + at, mask=live[None, None, :], other=0)
            factor = tl.load(scale_at + at // STEP)
        else:
            inside = at + place < end
            codes = tl.load(codes_at + at, mask=inside[:, None, :], other=0)
            value = tl.load(x_at + at, mask=inside[:, :, None] & live[None, None, :], other=0)
            factor = tl.load(scale_at + at // STEP, mask=(at + part * STEP < end)[:, None], other=0)
        both = tl.dot(raw_fp8(codes, ASM), operand(value, ASM), input_precision="ieee")
        total += both * factor[:, :, None]
    return true_fp8(tl.sum(total, 0), ASM)


@triton.jit
def many_tokens(
    weight, x, live, scale, begin, end,
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
    for at in tl.range(begin, end, STEP, num_stages=STAGES):
        if EVEN:
            codes = tl.load(codes_at + at)
            value = tl.load(x_at + at, mask=live[:, None], other=0)
        else:
            inside = at + k < end
            codes = tl.load(codes_at + at, mask=inside[:, None], other=0)
            value = tl.load(x_at + at, mask=inside[None, :] & live[:, None], other=0)
        factor = tl.load(scale + at // STEP)
        value = value if ASM else value.to(tl.float32)
        both = tl.dot(value, widen_fp8(codes, ASM), input_precision="ieee")
        if ONE_SCALE:
            total += both * factor
        else:
            total += both * factor[None, :]
    return total
