# SPDX-License-Identifier: Apache-2.0
"""Projections over FP8 blocks: one launch, whatever the number of tokens.

Up to `FEW` tokens the time is that of the weights' bytes. A program computes a few outputs; its
warps share the inputs among themselves and add up at the end, in a fixed order, so no second launch
joins partial sums and the order does not depend on the number of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, release, wait
from freewheel.ops.cuda.streaming import few_tokens, many_tokens
from freewheel.ops.registry import SPECIFICATIONS, implement

FEW = 32
"""Tokens up to which a projection streams its weights."""

STEPS = (32, 64, 128)
"""Inputs that one scale may cover; other blocks are left to the specification."""


class Tile(NamedTuple):
    """Of one program: outputs, warps that share the inputs, and loads ahead."""

    outputs: int
    slices: int
    stages: int


def tile_for(outputs: int, inputs: int) -> Tile:
    """By the weight's shape alone, so that a sum's order does not depend on the tokens."""
    if inputs <= 2560:
        return Tile(32, 2, 4)
    return Tile(32, 4, 4) if outputs >= 6144 else Tile(16, 4, 4)


@triton.jit
def _few(
    x, weight, scale, out, M, N, K, BLOCK_N,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.minimum(n, N - 1)
    scale_row = scale + row // BLOCK_N * tl.cdiv(K, STEP)
    total = few_tokens(
        weight + row.to(tl.int64) * K, x + m.to(tl.int64) * K, m < M, scale_row, K,
        OUTPUTS, TOKENS, SLICES, STEP, STAGES, EVEN, ASM,
    )  # fmt: skip
    release(CHAINED)
    target = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def _many(
    x, weight, scale, out, M, N, K, BLOCK_N,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    ONE_SCALE: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(n, N - 1)
    first = tl.program_id(1) * OUTPUTS if ONE_SCALE else row
    scale_row = scale + first // BLOCK_N * tl.cdiv(K, STEP)
    total = many_tokens(
        weight + row.to(tl.int64) * K, x + m.to(tl.int64) * K, m < M, scale_row, K,
        OUTPUTS, TOKENS, STEP, STAGES, ONE_SCALE, EVEN, ASM,
    )  # fmt: skip
    release(CHAINED)
    target = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def uses_matrix_units(x: Tensor) -> bool:
    """bfloat16 on a device; elsewhere (float32, the interpreter) weights widen to float32."""
    return x.is_cuda and x.dtype == torch.bfloat16


@implement("block_linear", "cuda")
def block_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, block_n: int = 128, block_k: int = 128
) -> Tensor:
    outputs, inputs = weight.shape
    tokens = x.numel() // inputs
    if x.dtype not in (torch.bfloat16, torch.float32) or block_k not in STEPS or not tokens:
        return SPECIFICATIONS["block_linear"](x, weight, weight_scale, block_n, block_k)
    out = x.new_empty((*x.shape[:-1], outputs))
    args = (
        x.contiguous(), weight.view(torch.uint8), weight_scale, out, tokens, outputs, inputs,
        block_n,
    )  # fmt: skip
    if tokens <= FEW:
        _launch_few(args, tile_for(outputs, inputs), block_k)
    else:
        _launch_many(args, block_k)
    return out


def _launch_few(args: tuple[Tensor | int, ...], tile: Tile, step: int) -> None:
    x, tokens, outputs, inputs = args[0], int(args[4]), int(args[5]), int(args[6])
    assert isinstance(x, Tensor)
    wide = max(8, triton.next_power_of_2(tokens))
    stages = min(tile.stages, 3) if wide == FEW else tile.stages  # room for two programs
    _few[(triton.cdiv(outputs, tile.outputs), 1)](
        *args, OUTPUTS=tile.outputs, TOKENS=wide, SLICES=tile.slices, STEP=step,
        STAGES=stages, EVEN=inputs % (step * tile.slices) == 0, ASM=uses_matrix_units(x),
        CHAINED=CHAINED, num_warps=tile.slices, launch_pdl=CHAINED,
    )  # fmt: skip


def _launch_many(args: tuple[Tensor | int, ...], step: int) -> None:
    x, tokens, outputs, inputs = args[0], int(args[4]), int(args[5]), int(args[6])
    assert isinstance(x, Tensor)
    fast = uses_matrix_units(x)
    rows, columns = (128, 128) if fast else (32, 32)
    rows = min(rows, max(32, triton.next_power_of_2(tokens)))
    _many[(triton.cdiv(tokens, rows), triton.cdiv(outputs, columns))](
        *args, OUTPUTS=columns, TOKENS=rows, STEP=step, STAGES=3 if fast else 2,
        ONE_SCALE=int(args[7]) % columns == 0, EVEN=inputs % step == 0, ASM=fast,
        CHAINED=CHAINED, num_warps=8 if rows == 128 else 4, launch_pdl=CHAINED,
    )  # fmt: skip
