# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn's iteration over many small matrices as one operator with its own backward pass.

Written out, its steps are a hundred tiny operators a layer, which cost more to launch and to
compile than the rest of the layer. Here one kernel keeps a token's matrix in registers. A step
divides by sums, y = x / s; so dx = (dy - sum(dy * y)) / s, and x = y * s is had back from the
sums alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU has no use for it
    triton = None

BLOCK = 32
"""Matrices that one program takes."""


def _steps(iterations: int) -> list[int]:
    """The dimension each step sums over: columns, then rows and columns in turn."""
    return [-2, *([-1, -2] * (iterations - 1))]


if triton is not None:

    @triton.jit
    def _cells(count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        one = tl.arange(0, SIZE)
        cell = rows[:, None, None] * SIZE * SIZE + one[None, :, None] * SIZE + one[None, None, :]
        side = rows[:, None] * SIZE + one[None, :]
        return cell, (rows < count)[:, None, None], side, (rows < count)[:, None]

    @triton.jit
    def _forward_kernel(
        mix, out, sums, count, eps, ROUNDS, SIZE: tl.constexpr, BLOCK: tl.constexpr
    ):
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


@torch.library.custom_op("train::sinkhorn", mutates_args=())
def sinkhorn(mix: Tensor, eps: float, iterations: int) -> tuple[Tensor, Tensor]:
    """(balanced float32 [N, S, S], the sums divided by [2 * iterations - 1, N, S])."""
    out, steps = mix.contiguous().clone(), _steps(iterations)
    sums = mix.new_empty((len(steps), *mix.shape[:-1]))
    for at, dim in enumerate(steps):
        s = out.sum(dim, keepdim=True) + eps
        sums[at] = s.squeeze(dim)
        out /= s
    return out, sums


@torch.library.custom_op("train::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(grad: Tensor, out: Tensor, sums: Tensor) -> Tensor:
    g, y, steps = grad.clone(), out, _steps((sums.shape[0] + 1) // 2)
    for at in reversed(range(len(steps))):
        s = sums[at].unsqueeze(steps[at])
        g = (g - (g * y).sum(steps[at], keepdim=True)) / s
        y = y * s
    return g


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


if triton is not None:
    sinkhorn.register_kernel("cuda")(launch_forward)
    sinkhorn_backward.register_kernel("cuda")(launch_backward)


@sinkhorn.register_fake
def _(mix: Tensor, eps: float, iterations: int) -> tuple[Tensor, Tensor]:
    out = torch.empty(mix.shape, dtype=mix.dtype, device=mix.device)
    return out, mix.new_empty((2 * iterations - 1, *mix.shape[:-1]))


@sinkhorn_backward.register_fake
def _(grad: Tensor, out: Tensor, sums: Tensor) -> Tensor:
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    return sinkhorn_backward(grad, *ctx.saved_tensors), None, None


sinkhorn.register_autograd(_gradient, setup_context=_keep)


def balanced(mix: Tensor, eps: float, iterations: int) -> Tensor:
    """mix [..., S, S], positive: rows and columns that sum to one, as nearly as the steps reach."""
    out, _ = sinkhorn(mix.flatten(0, -3).contiguous(), eps, iterations)
    return out.view_as(mix)
