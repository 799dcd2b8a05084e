# SPDX-License-Identifier: Apache-2.0
"""Projections over FP8 blocks of so many tokens that arithmetic is what costs.

The weight is widened to bfloat16 in memory, a slab at a time, and the library multiplies: its
product runs at twice the rate of a kernel that widens each tile again for every tile of tokens.
A number times its block's scale is rounded to bfloat16 here, which is exact where scales are powers
of two, and adds at most 2^-9 of the sum of the products' magnitudes elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.streaming import widen_fp8

SLAB = 1 << 25
"""Numbers of a weight that are widened at once: 64 MB."""

ROWS = 32
"""Outputs of one program; its inputs are those that a scale covers."""


@triton.jit
def _widen(
    weight, scale, out, N, K, BLOCK_N,
    ROWS: tl.constexpr, STEP: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) * STEP + tl.arange(0, STEP)
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    there = (n < N)[:, None] & (k < K)[None, :]
    codes = tl.load(weight + at, mask=there, other=0)
    place = n // BLOCK_N * tl.cdiv(K, STEP) + tl.program_id(0)
    factor = tl.load(scale + place, mask=n < N, other=0)
    value = widen_fp8(codes, ASM).to(tl.float32) * factor[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


def multiply_widened(
    x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, block_n: int, block_k: int
) -> Tensor:
    """`out` [..., N], set to x [..., K] times the transposed weight; both contiguous bfloat16."""
    outputs, inputs = weight.shape
    rows = min(outputs, max(1, SLAB // (inputs * block_n)) * block_n)
    room = x.new_empty((rows, inputs))
    tokens, target = x.view(-1, inputs), out.view(-1, outputs)
    for begin in range(0, outputs, rows):
        own = weight[begin : begin + rows].view(torch.uint8)
        count = own.shape[0]
        _widen[(triton.cdiv(inputs, block_k), triton.cdiv(count, ROWS))](
            own, scale[begin // block_n :], room, count, inputs, block_n, ROWS=ROWS, STEP=block_k,
            ASM=x.is_cuda, CHAINED=CHAINED, launch_pdl=CHAINED,
        )  # fmt: skip
        torch.mm(tokens, room[:count].t(), out=target[:, begin : begin + count])
    return out
