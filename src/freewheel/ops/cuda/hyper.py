# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections in two launches before a layer and one behind it.

The first takes a slice of all streams' elements a program, so that many programs read the weights
at once; the second adds the slices up in ascending order, and one of its programs balances a
token's whole mix. Slices are `SLICE` elements: a sum's order depends on the model alone. Where it
can be, the second is in CUDA C++ (`sources/enter_layer.cu`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.dense import warps_for
from freewheel.ops.cuda.native import Kernel, lacking
from freewheel.ops.registry import SPECIFICATIONS, implement

SLICE = 128
"""Elements of one program that multiplies."""

FEW, TOKENS = 8, 4
"""Up to `FEW` tokens have programs of their own; of more, a program takes `TOKENS`."""

ELEMENTS = 1024
"""Elements of a stream that one program mixes."""


@triton.jit
def _slice_logits(
    streams, weight, part_out, size_out, n, SIZE, M,
    TOKENS: tl.constexpr, SLICE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of a slice: products with every row of `weight` [M, SIZE], and the sum of squares."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    lane, m = part * SLICE + tl.arange(0, SLICE), tl.arange(0, BLOCK_M)
    inside = lane < SIZE
    own = weight + m[:, None] * SIZE + lane[None, :]
    rows = tl.load(own, mask=(m < M)[:, None] & inside[None, :], other=0)  # [M, SLICE]
    for index in tl.static_range(TOKENS):
        token = (tl.program_id(0) * TOKENS + index).to(tl.int64)
        there = inside & (token < n)
        value = tl.load(streams + token * SIZE + lane, mask=there, other=0).to(tl.float32)
        product = tl.sum(rows * value[None, :], 1)
        cell = token * parts + part
        tl.store(part_out + cell * M + m, product, mask=(m < M) & (token < n))
        tl.store(size_out + cell, tl.sum(value * value, 0), mask=token < n)


@triton.jit
def _inverse_size(sizes, token, parts, SIZE, eps, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    square = tl.sum(tl.load(sizes + token * parts + part, mask=part < parts, other=0), 0)
    return 1 / tl.sqrt(square / SIZE + eps)


@triton.jit
def _logits(
    part_in, token, parts, first, count, M, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """float32 [BLOCK]: `count` logits of a token from the `first` on, 0 behind."""
    part, m = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    own = part_in + (token * parts + part)[:, None] * M + first + m[None, :]
    return tl.sum(tl.load(own, mask=(part < parts)[:, None] & (m < count)[None, :], other=0), 0)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _summed(
    streams, share, token, d, D, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """float32 [BLOCK]: elements d of the streams [N, D], summed with share [BLOCK_N]."""
    nth = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(N):
        value = tl.load(streams + (token * N + j) * D + d, mask=d < D, other=0).to(tl.float32)
        total += tl.sum(tl.where(nth == j, share, 0.0), 0) * value
    return total


@triton.jit
def _collapse(
    streams, share, token, out, D, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store this program's piece of the streams [N, D] summed with share [BLOCK_N]."""
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = _summed(streams, share, token, d, D, N, BLOCK_N, BLOCK)
    tl.store(out + token * D + d, total.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _divide_columns(rows, eps, N: tl.constexpr):
    """Every column of N rows over its sum."""
    total = rows[0]
    for j in tl.static_range(1, N):
        total += rows[j]
    inverse = 1 / (total + eps)
    divided = ()
    for j in tl.static_range(N):
        divided += (rows[j] * inverse,)
    return divided


@triton.jit
def _store_mix(
    part_in, inverse, base, scale, token, post_out, mix_out, eps, parts,
    N: tl.constexpr, ITERATIONS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A token's post [N], and its mix [N, N], balanced."""
    M: tl.constexpr = (2 + N) * N
    nth = tl.arange(0, BLOCK_N)
    real = nth < N
    post = _logits(part_in, token, parts, N, N, M, PARTS, BLOCK_N) * inverse
    post = post * tl.load(scale + 1) + tl.load(base + N + nth, mask=real, other=0)
    tl.store(post_out + token * N + nth, 2 * _sigmoid(post), mask=real)
    # A row is a vector of its own: columns are summed without a word between threads.
    rows = ()
    for j in tl.static_range(N):
        row = _logits(part_in, token, parts, (2 + j) * N, N, M, PARTS, BLOCK_N) * inverse
        row = row * tl.load(scale + 2) + tl.load(base + (2 + j) * N + nth, mask=real, other=0)
        row = tl.where(real, row, float("-inf"))
        row = tl.exp(row - tl.max(row, 0))
        rows += (tl.where(real, row / tl.sum(row, 0) + eps, 0.0),)
    rows = _divide_columns(rows, eps, N)
    for _ in range(ITERATIONS - 1):
        divided = ()
        for j in tl.static_range(N):
            divided += (rows[j] * (1 / (tl.sum(rows[j], 0) + eps)),)
        rows = _divide_columns(divided, eps, N)
    for j in tl.static_range(N):
        tl.store(mix_out + (token * N + j) * N + nth, rows[j], mask=real)


@triton.jit
def _open(
    streams, part_in, size_in, base, scale, out, post_out, mix_out, norm_eps, eps, parts, D,
    N: tl.constexpr, ITERATIONS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK_N)
    real = nth < N
    inverse = _inverse_size(size_in, token, parts, N * D, norm_eps, PARTS)
    pre = _logits(part_in, token, parts, 0, N, (2 + N) * N, PARTS, BLOCK_N) * inverse
    pre = pre * tl.load(scale) + tl.load(base + nth, mask=real, other=0)
    _collapse(streams, _sigmoid(pre) + eps, token, out, D, N, BLOCK_N, BLOCK)
    if tl.program_id(1) == 0:
        _store_mix(
            part_in, inverse, base, scale, token, post_out, mix_out, eps, parts,
            N, ITERATIONS, PARTS, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _enter(
    streams, part_in, size_in, base, scale, weight, out, post_out, mix_out, norm_eps, eps,
    layer_eps, parts, D,
    N: tl.constexpr, ITERATIONS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program collapses a token's streams and norms the result; another one balances."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        nth, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)
        gain = tl.load(weight + d, mask=d < D, other=0).to(tl.float32)
        follow(CHAINED)
        values = ()  # asked for before the sums that their shares follow from
        for j in tl.static_range(N):
            values += (tl.load(streams + (token * N + j) * D + d, mask=d < D, other=0),)
        inverse = _inverse_size(size_in, token, parts, N * D, norm_eps, PARTS)
        pre = _logits(part_in, token, parts, 0, N, (2 + N) * N, PARTS, BLOCK_N) * inverse
        pre = pre * tl.load(scale) + tl.load(base + nth, mask=nth < N, other=0)
        share = _sigmoid(pre) + eps
        total = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(N):
            total += tl.sum(tl.where(nth == j, share, 0.0), 0) * values[j].to(tl.float32)
        x = total.to(out.dtype.element_ty).to(tl.float32)  # as an x of its own would be rounded
        x = x * (1 / tl.sqrt(tl.sum(x * x, 0) / D + layer_eps)) * gain
        tl.store(out + token * D + d, x.to(out.dtype.element_ty), mask=d < D)
    else:
        follow(CHAINED)
        inverse = _inverse_size(size_in, token, parts, N * D, norm_eps, PARTS)
        _store_mix(
            part_in, inverse, base, scale, token, post_out, mix_out, eps, parts,
            N, ITERATIONS, PARTS, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _collapse_head(
    streams, part_in, size_in, base, scale, out, norm_eps, eps, parts, D,
    N: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK_N)
    inverse = _inverse_size(size_in, token, parts, N * D, norm_eps, PARTS)
    pre = _logits(part_in, token, parts, 0, N, N, PARTS, BLOCK_N) * inverse
    pre = pre * tl.load(scale) + tl.load(base + nth, mask=nth < N, other=0)
    _collapse(streams, _sigmoid(pre) + eps, token, out, D, N, BLOCK_N, BLOCK)


@triton.jit
def _close(y, streams, post, mix, out, D, N: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = streams + token * N * D + d
    added = tl.load(y + token * D + d, mask=d < D, other=0).to(tl.float32)
    for k in tl.static_range(N):
        total = tl.load(post + token * N + k) * added
        for j in tl.static_range(N):
            value = tl.load(own + j * D, mask=d < D, other=0).to(tl.float32)
            total += tl.load(mix + (token * N + j) * N + k) * value
        target = out + (token * N + k) * D + d
        tl.store(target, total.to(out.dtype.element_ty), mask=d < D)


def _slices(streams: Tensor, weight: Tensor, fixed: bool) -> tuple[Tensor, Tensor]:
    """Of contiguous streams [..., N, D], n of them: products float32 [n, P, M], squares [n, P]."""
    size = streams.shape[-2] * streams.shape[-1]
    rows, n, parts = weight.shape[0], streams.numel() // size, triton.cdiv(size, SLICE)
    products = torch.empty((n, parts, rows), dtype=torch.float32, device=streams.device)
    squares = torch.empty((n, parts), dtype=torch.float32, device=streams.device)
    tokens = 1 if n <= FEW and not fixed else TOKENS
    _slice_logits[(triton.cdiv(n, tokens), parts)](
        streams, weight, products, squares, n, size, rows,
        TOKENS=tokens, SLICE=SLICE, BLOCK_M=triton.next_power_of_2(rows), num_warps=4,
    )  # fmt: skip
    return products, squares


def _pieces(streams: Tensor) -> tuple[tuple[int, int], int]:
    """Grid over tokens and pieces of D, and the elements of a piece."""
    count, dim = streams.shape[-2:]
    block = min(ELEMENTS, triton.next_power_of_2(dim))
    return (streams.numel() // (count * dim), triton.cdiv(dim, block)), block


@implement("hyper_open", "cuda")
def hyper_open(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    if weight.dtype != torch.float32 or streams.dtype == torch.float64:
        args = (streams, weight, base, scale, norm_eps, eps, iterations)
        return SPECIFICATIONS["hyper_open"](*args)
    streams, lead, (count, dim) = streams.contiguous(), streams.shape[:-2], streams.shape[-2:]
    x = streams.new_empty((*lead, dim))
    post = weight.new_empty((*lead, count))
    mix = weight.new_empty((*lead, count, count))
    if streams.numel():
        products, squares = _slices(streams, weight, fixed)
        grid, block = _pieces(streams)
        parts = squares.shape[1]
        _open[grid](
            streams, products, squares, base, scale, x, post, mix, norm_eps, eps, parts, dim,
            N=count, ITERATIONS=iterations, PARTS=triton.next_power_of_2(parts),
            BLOCK_N=triton.next_power_of_2(count), BLOCK=block, num_warps=4,
        )  # fmt: skip
    return x, post, mix


@implement("hyper_enter", "cuda")
def hyper_enter(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    layer_weight: Tensor,
    layer_eps: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    if weight.dtype != torch.float32 or streams.dtype == torch.float64:
        args = (streams, weight, base, scale, norm_eps, eps, iterations, layer_weight, layer_eps)
        return SPECIFICATIONS["hyper_enter"](*args)
    streams = streams.contiguous()
    mixing = Mixing(base, scale, norm_eps, eps, iterations, layer_weight, layer_eps)
    return launch_enter(
        streams, _slices(streams, weight, fixed) if streams.numel() else None, mixing
    )


KERNEL = Kernel("enter_layer", "pppppppppfff")

STREAMS, VECTOR, MOST_THREADS = 4, 8, 256
"""Of a block of `KERNEL`: streams, elements that a thread reads at once, threads that collapse."""


def threads_for(streams: Tensor, layer_weight: Tensor) -> int | None:
    """Threads of `KERNEL` that collapse streams [..., N, D]; None if it does not take them."""
    (count, dim), weights = streams.shape[-2:], (torch.bfloat16, torch.float32)
    vectors, rest = divmod(dim, VECTOR)
    if rest or count != STREAMS or streams.dtype != weights[0] or layer_weight.dtype not in weights:
        return None
    found = [n for n in range(32, MOST_THREADS + 1, 32) if vectors % n == 0 and vectors <= 4 * n]
    return max(found, default=None)


class Mixing(NamedTuple):
    """How a layer is entered once the logits of its mix are there: arguments of `hyper_enter`."""

    base: Tensor  # float32 [(2 + N) * N]
    scale: Tensor  # float32 [3]
    norm_eps: float
    eps: float
    iterations: int
    layer_weight: Tensor  # float [D]
    layer_eps: float


def launch_enter(
    streams: Tensor, sliced: tuple[Tensor, Tensor] | None, own: Mixing
) -> tuple[Tensor, Tensor, Tensor]:
    """(x, post, mix) of contiguous streams and what `_slices` gives of them; None: no tokens."""
    lead, (count, dim) = streams.shape[:-2], streams.shape[-2:]
    x = streams.new_empty((*lead, dim))
    post = own.base.new_empty((*lead, count))
    mix = own.base.new_empty((*lead, count, count))
    threads = threads_for(streams, own.layer_weight)
    if sliced is not None and threads is not None and lacking() is None:
        products, squares = sliced
        KERNEL.launch(
            squares.shape[0], threads + 32, 4 * (threads + 32 + threads // 32),
            streams, products, squares, own.base, own.scale, own.layer_weight, x, post, mix,
            own.norm_eps, own.eps, own.layer_eps, DIM=dim, PARTS=squares.shape[1], THREADS=threads,
            ITERATIONS=own.iterations,
            WIDE=int(own.layer_weight.dtype == torch.float32),
        )  # fmt: skip
    elif sliced is not None:
        products, squares = sliced
        parts, block = squares.shape[1], triton.next_power_of_2(dim)
        _enter[(squares.shape[0], 2)](
            streams, products, squares, own.base, own.scale, own.layer_weight, x, post, mix,
            own.norm_eps, own.eps, own.layer_eps, parts, dim,
            N=count, ITERATIONS=own.iterations, PARTS=triton.next_power_of_2(parts),
            BLOCK_N=triton.next_power_of_2(count), BLOCK=block, CHAINED=CHAINED,
            num_warps=warps_for(block), launch_pdl=CHAINED,
        )  # fmt: skip
    return x, post, mix


@implement("hyper_close", "cuda")
def hyper_close(y: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    if post.dtype != torch.float32 or streams.dtype == torch.float64:
        return SPECIFICATIONS["hyper_close"](y, streams, post, mix)
    y, streams = y.contiguous(), streams.contiguous()
    out, (count, dim) = torch.empty_like(streams), streams.shape[-2:]
    if streams.numel():
        grid, block = _pieces(streams)
        _close[grid](
            y, streams, post.contiguous(), mix.contiguous(), out, dim,
            N=count, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@implement("hyper_collapse", "cuda")
def hyper_collapse(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    fixed: bool = False,
) -> Tensor:
    if weight.dtype != torch.float32 or streams.dtype == torch.float64:
        return SPECIFICATIONS["hyper_collapse"](streams, weight, base, scale, norm_eps, eps)
    streams, (count, dim) = streams.contiguous(), streams.shape[-2:]
    x = streams.new_empty((*streams.shape[:-2], dim))
    if streams.numel():
        products, squares = _slices(streams, weight, fixed)
        grid, block = _pieces(streams)
        parts = squares.shape[1]
        _collapse_head[grid](
            streams, products, squares, base, scale, x, norm_eps, eps, parts, dim,
            N=count, PARTS=triton.next_power_of_2(parts),
            BLOCK_N=triton.next_power_of_2(count), BLOCK=block, num_warps=4,
        )  # fmt: skip
    return x
