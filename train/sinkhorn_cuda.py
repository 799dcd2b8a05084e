# SPDX-License-Identifier: Apache-2.0
"""The operator of `sinkhorn.py` on a card: one launch each way, a token's matrix in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32
"""Matrices that one program takes."""


@triton.jit
def _cells(count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.arange(0, SIZE)
    cell = rows[:, None, None] * SIZE * SIZE + one[None, :, None] * SIZE + one[None, None, :]
    side = rows[:, None] * SIZE + one[None, :]
    return cell, (rows < count)[:, None, None], side, (rows < count)[:, None]


@triton.jit
def _forward_kernel(mix, out, sums, count, eps, ROUNDS, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    cell, inside, side, here = _cells(count, SIZE, BLOCK)
    stride = count * SIZE
    x = tl.load(mix + cell, mask=inside, other=1.0)
    s = tl.sum(x, 1) + eps
    tl.store(sums + side, s, mask=here)
    x = x / s[:, None, :]
    for k in range(ROUNDS):
        s = tl.sum(x, 2) + eps
        tl.store(sums + (2 * k + 1) * stride + side, s, mask=here)
        x = x / s[:, :, None]
        s = tl.sum(x, 1) + eps
        tl.store(sums + (2 * k + 2) * stride + side, s, mask=here)
        x = x / s[:, None, :]
    tl.store(out + cell, x, mask=inside)


@triton.jit
def _backward_kernel(
    grad, out, sums, result, count, ROUNDS, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    cell, inside, side, here = _cells(count, SIZE, BLOCK)
    stride = count * SIZE
    g = tl.load(grad + cell, mask=inside, other=0.0)
    y = tl.load(out + cell, mask=inside, other=1.0)
    for i in range(ROUNDS):
        k = ROUNDS - 1 - i
        s = tl.load(sums + (2 * k + 2) * stride + side, mask=here, other=1.0)
        g = (g - tl.sum(g * y, 1)[:, None, :]) / s[:, None, :]
        y = y * s[:, None, :]
        s = tl.load(sums + (2 * k + 1) * stride + side, mask=here, other=1.0)
        g = (g - tl.sum(g * y, 2)[:, :, None]) / s[:, :, None]
        y = y * s[:, :, None]
    s = tl.load(sums + side, mask=here, other=1.0)
    g = (g - tl.sum(g * y, 1)[:, None, :]) / s[:, None, :]
    tl.store(result + cell, g, mask=inside)


def launch_forward(mix: Tensor, eps: float, iterations: int) -> tuple[Tensor, Tensor]:
    mix = mix.contiguous()
    count, size = mix.shape[0], mix.shape[-1]
    out = torch.empty_like(mix)
    sums = mix.new_empty((2 * iterations - 1, count, size))
    grid = (-(-count // BLOCK),)
    _forward_kernel[grid](mix, out, sums, count, eps, iterations - 1, SIZE=size, BLOCK=BLOCK)
    return out, sums


def launch_backward(grad: Tensor, out: Tensor, sums: Tensor) -> Tensor:
    grad = grad.contiguous()
    result, (steps, count, size) = torch.empty_like(grad), sums.shape
    grid = (-(-count // BLOCK),)
    _backward_kernel[grid](grad, out, sums, result, count, steps // 2, SIZE=size, BLOCK=BLOCK)
    return result
