# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn's iteration over many small matrices as one operator with its own backward pass.

Written out, its steps are a hundred tiny operators a layer, which cost more to launch and to
compile than the rest of the layer. Here one kernel keeps a token's matrix in registers. A step
divides by sums, y = x / s; so dx = (dy - sum(dy * y)) / s, and x = y * s is had back from the
sums alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

if torch.cuda.is_available():
    from sinkhorn_cuda import launch_backward, launch_forward
else:
    launch_forward = launch_backward = None


def _steps(iterations: int) -> list[int]:
    """The dimension each step sums over: columns, then rows and columns in turn."""
    return [-2, *([-1, -2] * (iterations - 1))]


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


if launch_forward is not None and launch_backward is not None:
    sinkhorn.register_kernel("cuda")(launch_forward)
    sinkhorn_backward.register_kernel("cuda")(launch_backward)


@sinkhorn.register_fake
def _(mix: Tensor, eps: float, iterations: int) -> tuple[Tensor, Tensor]:
    out = torch.empty(mix.shape, dtype=mix.dtype, device=mix.device)
    return out, mix.new_empty((2 * iterations - 1, *mix.shape[:-1]))


@sinkhorn_backward.register_fake
def _(grad: Tensor, out: Tensor, sums: Tensor) -> Tensor:
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    return sinkhorn_backward(grad, *ctx.saved_tensors), None, None


sinkhorn.register_autograd(_gradient, setup_context=_keep)


def balanced(mix: Tensor, eps: float, iterations: int) -> Tensor:
    """mix [..., S, S], positive: rows and columns that sum to one, as nearly as the steps reach."""
    out, _ = sinkhorn(mix.flatten(0, -3).contiguous(), eps, iterations)
    return out.view_as(mix)
