# SPDX-License-Identifier: Apache-2.0
"""From one layer on parallel streams into the next, in two launches.

The first closes the layer that is left, a slice of every stream a program, and while it holds the
new elements multiplies them by the weights of the layer that is entered. Those weights are on their
way before the kernel in front has ended. The second adds the slices up, in ascending order, as
`hyper` does. For many tokens the first is in CUDA C++ (`sources/close_slices.cu`), by matrix units.
Where that cannot be, they are closed and entered apart: a program for each would read the weights
once a token, and one that takes tokens in turn waits for each of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, release, wait
from freewheel.ops.cuda.hyper import Mixing, hyper_close, hyper_enter, launch_enter
from freewheel.ops.cuda.native import Kernel, lacking
from freewheel.ops.registry import SPECIFICATIONS, implement

SLICE = 128
"""Elements of each stream that one program closes."""

KERNEL = Kernel("close_slices", "ppppppppi")

STREAMS, PART, BLOCK_TOKENS = 4, 32, 128
"""Of a block of `KERNEL`: streams, elements of each, tokens."""

SHARED = STREAMS * (2 + STREAMS) * STREAMS * PART * 6
"""Bytes of shared memory of a block: its weights, in thirds of two bytes."""

FEW = 8
"""Tokens up to which each has programs of its own; for more, weights would be read too often."""


@triton.jit
def _close_slice(
    y, streams, post, mix, weight, out, part_out, size_out, D,
    N: tl.constexpr, M: tl.constexpr, SLICE: tl.constexpr, BLOCK_M: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Of a slice: the next streams, their products with `weight` [M, N * D], and their squares."""
    token, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    d, m = part * SLICE + tl.arange(0, SLICE), tl.arange(0, BLOCK_M)
    inside = d < D
    rows = ()
    for j in tl.static_range(N):
        own = weight + m[:, None] * (N * D) + (j * D + d)[None, :]
        rows += (tl.load(own, mask=(m < M)[:, None] & inside[None, :], other=0),)
    wait(CHAINED)
    added = tl.load(y + token * D + d, mask=inside, other=0).to(tl.float32)
    values = ()
    for j in tl.static_range(N):
        value = tl.load(streams + (token * N + j) * D + d, mask=inside, other=0)
        values += (value.to(tl.float32),)
    product = tl.zeros((BLOCK_M, SLICE), tl.float32)
    square = tl.zeros((SLICE,), tl.float32)
    for k in tl.static_range(N):
        total = tl.load(post + token * N + k) * added
        for j in tl.static_range(N):
            total += tl.load(mix + (token * N + j) * N + k) * values[j]
        value = total.to(out.dtype.element_ty)
        tl.store(out + (token * N + k) * D + d, value, mask=inside)
        new = value.to(tl.float32)
        product += rows[k] * new[None, :]
        square += new * new
    release(CHAINED)
    cell = token * parts + part
    tl.store(part_out + cell * M + m, tl.sum(product, 1), mask=m < M)
    tl.store(size_out + cell, tl.sum(square, 0))


def _close_and_slice(
    y: Tensor, streams: Tensor, post: Tensor, mix: Tensor, weight: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The next streams; products float32 [n, P, M] and squares [n, P] of n tokens."""
    out, (count, dim), rows = torch.empty_like(streams), streams.shape[-2:], weight.shape[0]
    n, parts = streams.numel() // (count * dim), triton.cdiv(dim, SLICE)
    products = torch.empty((n, parts, rows), dtype=torch.float32, device=out.device)
    squares = torch.empty((n, parts), dtype=torch.float32, device=out.device)
    _close_slice[(n, parts)](
        y, streams, post, mix, weight, out, products, squares, dim,
        N=count, M=rows, SLICE=SLICE, BLOCK_M=triton.next_power_of_2(rows), CHAINED=CHAINED,
        num_warps=8, launch_pdl=CHAINED,
    )  # fmt: skip
    return out, (products, squares)


def takes(y: Tensor, streams: Tensor) -> bool:
    """Whether `close_many` closes layers on streams [..., N, D] of y's dtype."""
    alike = y.dtype == streams.dtype == torch.bfloat16
    if not alike or streams.shape[-2] != STREAMS or streams.shape[-1] % PART:
        return False
    return lacking() is None


def close_many(
    y: Tensor, streams: Tensor, post: Tensor, mix: Tensor, weight: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As `_close_and_slice` gives it, in parts of `PART` elements of every stream."""
    out, dim, rows = torch.empty_like(streams), streams.shape[-1], weight.shape[0]
    n, parts = y.numel() // dim, dim // PART
    products = torch.empty((n, parts, rows), dtype=torch.float32, device=out.device)
    squares = torch.empty((n, parts), dtype=torch.float32, device=out.device)
    KERNEL.launch(
        parts * triton.cdiv(n, BLOCK_TOKENS), 256, SHARED,
        y, streams, post, mix, weight, out, products, squares, n, DIM=dim,
    )  # fmt: skip
    return out, (products, squares)


@implement("hyper_cross", "cuda")
def hyper_cross(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    mix: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    layer_weight: Tensor,
    layer_eps: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = Mixing(base, scale, norm_eps, eps, iterations, layer_weight, layer_eps)
    if weight.dtype != torch.float32 or streams.dtype == torch.float64:
        return SPECIFICATIONS["hyper_cross"](y, streams, post, mix, weight, *own)
    left = (y.contiguous(), streams.contiguous(), post.contiguous(), mix.contiguous())
    few, many = y.numel() <= FEW * y.shape[-1], takes(y, streams)
    if fixed:
        few = not many
    if y.numel() and (few or many):
        close = _close_and_slice if few else close_many
        out, sliced = close(*left, weight.contiguous())
        return out, *launch_enter(out, sliced, own)
    out = hyper_close(*left)
    return out, *hyper_enter(out, weight, *own, fixed)
