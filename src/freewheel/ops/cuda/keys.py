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
def _turn(
    x, out, weight, positions, table, slots, eps, sign, H, D,
    SPAN: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr, STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    lane = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    inside = lane < D
    value = tl.load(x + (token * H + head) * D + lane, mask=inside, other=0).to(tl.float32)
    if NORM:
        size = tl.sum(tl.sum(value * value, 1), 0)
        value = value * (1 / tl.sqrt(size / D + eps))
    if WEIGHTED:
        value = value * tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    first, second = tl.split(value)
    angles = table + tl.load(positions + token).to(tl.int64) * SPAN
    low, high = turn_tail(first, second, angles, pair, D, sign, SPAN)
    if STORE:
        target = out + tl.load(slots + token) * D
    else:
        target = out + (token * H + head) * D
    tl.store(target + lane, tl.join(low, high).to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor,  # [B, W, H, D], contiguous
    out: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    *,
    weight: Tensor | None = None,
    slots: Tensor | None = None,
    eps: float | None = None,
    sign: float = 1.0,
) -> None:
    (batch, width, heads, dim), span = x.shape, rope_table.shape[1]
    block = triton.next_power_of_2(max(2, dim // 2))
    if x.numel():
        _turn[(batch * width, heads)](
            x, out, x if weight is None else weight, positions.contiguous(), rope_table,
            positions if slots is None else slots.contiguous(), eps or 0.0, sign, heads, dim,
            SPAN=span, NORM=eps is not None, WEIGHTED=weight is not None, STORE=slots is not None,
            BLOCK=block, num_warps=warps_for(2 * block),
        )  # fmt: skip


def _is_plain(x: Tensor) -> bool:
    """Whether the kernel serves for vectors of this dtype and width."""
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
    if _is_plain(key):
        own = key.contiguous()[:, :, None]
        _launch(own, cache, positions, rope_table, weight=norm_weight, slots=slots, eps=eps)
    else:
        SPECIFICATIONS["store_key"](cache, key, norm_weight, eps, positions, rope_table, slots)
