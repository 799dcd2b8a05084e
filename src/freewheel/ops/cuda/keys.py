# SPDX-License-Identifier: Apache-2.0
"""Norm and rotation of vectors whose last dimensions turn in neighbouring pairs, in one launch.

A program takes one vector: a head of a query, or a token's key on its way into the cache. It is
held as pairs, so that what turns together lies in one thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.dense import warps_for
from freewheel.ops.registry import SPECIFICATIONS, implement


@triton.jit
def turn_tail(first, second, angles, pair, D, sign, SPAN: tl.constexpr):
    """Pairs of a vector of D elements, those of its last SPAN turned: float32 [BLOCK] each.

    `sign` -1 turns back.
    """
    index = pair - (D - SPAN) // 2
    tail = (index >= 0) & (pair < D // 2)
    cos = tl.load(angles + index, mask=tail, other=1)
    sin = tl.load(angles + SPAN // 2 + index, mask=tail, other=0) * sign
    low = tl.where(tail, first * cos - second * sin, first)
    high = tl.where(tail, second * cos + first * sin, second)
    return low, high


@triton.jit
def turned(
    source, weight, angles, eps, sign, D,
    SPAN: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK, 2]: a vector of D elements in pairs, normed, its last SPAN turned."""
    pair = tl.arange(0, BLOCK)
    lane = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    inside = lane < D
    value = tl.load(source + lane, mask=inside, other=0).to(tl.float32)
    if NORM:
        size = tl.sum(tl.sum(value * value, 1), 0)
        value = value * (1 / tl.sqrt(size / D + eps))
    if WEIGHTED:
        value = value * tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    first, second = tl.split(value)
    low, high = turn_tail(first, second, angles, pair, D, sign, SPAN)
    return tl.join(low, high)


@triton.jit
def turn_one(
    source, target, weight, angles, eps, sign, D,
    SPAN: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same, stored at `target`."""
    value = turned(source, weight, angles, eps, sign, D, SPAN, NORM, WEIGHTED, BLOCK)
    lane = 2 * tl.arange(0, BLOCK)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(target + lane, value.to(target.dtype.element_ty), mask=lane < D)


@triton.jit
def _turn(
    x, out, positions, table, eps, sign, H, D,
    SPAN: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = (token * H + tl.program_id(1)) * D
    angles = table + tl.load(positions + token).to(tl.int64) * SPAN
    turn_one(x + at, out + at, x, angles, eps, sign, D, SPAN, NORM, False, BLOCK)


@triton.jit
def _place(
    query, out, key, cache, weight, positions, table, slots, query_eps, key_eps, H, D,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads 0 .. H - 1 of a token's query, and behind them its key."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = table + tl.load(positions + token).to(tl.int64) * SPAN
    if head < H:
        at = (token * H + head) * D
        turn_one(query + at, out + at, weight, angles, query_eps, 1.0, D, SPAN, True, False, BLOCK)
    else:
        target = cache + tl.load(slots + token) * D
        turn_one(key + token * D, target, weight, angles, key_eps, 1.0, D, SPAN, True, True, BLOCK)


def _launch(
    x: Tensor,  # [B, W, H, D], contiguous
    out: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    *,
    eps: float | None = None,
    sign: float = 1.0,
) -> None:
    (batch, width, heads, dim), span = x.shape, rope_table.shape[1]
    block = triton.next_power_of_2(max(2, dim // 2))
    if x.numel():
        _turn[(batch * width, heads)](
            x, out, positions.contiguous(), rope_table, eps or 0.0, sign, heads, dim,
            SPAN=span, NORM=eps is not None, BLOCK=block, num_warps=warps_for(2 * block),
        )  # fmt: skip


def _is_plain(x: Tensor) -> bool:
    """Whether the kernels serve for vectors of this dtype and width."""
    return x.dtype != torch.float64 and x.shape[-1] % 2 == 0


@implement("rope_tail", "cuda")
def rope_tail(x: Tensor, positions: Tensor, rope_table: Tensor, inverse: bool) -> Tensor:
    if not _is_plain(x):
        return SPECIFICATIONS["rope_tail"](x, positions, rope_table, inverse)
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, out, positions, rope_table, sign=-1.0 if inverse else 1.0)
    return out


@implement("open_query", "cuda")
def open_query(x: Tensor, eps: float, positions: Tensor, rope_table: Tensor) -> Tensor:
    if not _is_plain(x):
        return SPECIFICATIONS["open_query"](x, eps, positions, rope_table)
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, out, positions, rope_table, eps=eps)
    return out


@implement("place_heads", "cuda")
def place_heads(
    cache: Tensor,
    query: Tensor,
    query_eps: float,
    key: Tensor,
    norm_weight: Tensor,
    key_eps: float,
    positions: Tensor,
    rope_table: Tensor,
    slots: Tensor,
) -> Tensor:
    if not _is_plain(query) or key.dtype == torch.float64:
        args = (query_eps, key, norm_weight, key_eps, positions, rope_table, slots)
        return SPECIFICATIONS["place_heads"](cache, query, *args)
    query, key = query.contiguous(), key.contiguous()
    (batch, width, heads, dim), out = query.shape, torch.empty_like(query)
    block = triton.next_power_of_2(max(2, dim // 2))
    if key.numel():
        _place[(batch * width, heads + 1)](
            query, out, key, cache, norm_weight, positions.contiguous(), rope_table,
            slots.contiguous(), query_eps, key_eps, heads, dim,
            SPAN=rope_table.shape[1], BLOCK=block, num_warps=warps_for(2 * block),
        )  # fmt: skip
    return out


@implement("store_key", "cuda")
def store_key(
    cache: Tensor,
    key: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    slots: Tensor,
) -> None:
    none = key[:, :, None][:, :, :0]
    place_heads(cache, none, eps, key, norm_weight, eps, positions, rope_table, slots)
