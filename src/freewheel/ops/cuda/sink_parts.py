# SPDX-License-Identifier: Apache-2.0
"""Parts of an attention with sinks, joined: each knows its highest score and its sum of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.keys import turn_tail

AHEAD = 8
"""Parts that a program asks for at once."""

SCRATCH = 1 << 24
"""Floats of unjoined parts held at once; wider rectangles go through in pieces of whole queries."""

Rooms = tuple[Tensor, Tensor, Tensor]
"""Parts that are not joined: see `room_for`."""


@dataclass(frozen=True)
class Close:
    """How outputs of N queries end: a sink of each head, and their last `span` values turned back.

    `span` 0: nothing turns, and `positions` and `table` are not read.
    """

    sinks: Tensor  # float [H]
    positions: Tensor  # int32 [N]
    table: Tensor  # float32 [T, span]  (cos | sin)
    span: int


def room_for(out: Tensor, parts: int) -> Rooms:
    """Parts of out [N, H, D]: weighted sums float32 [N, parts, H, D], highest scores and sums of
    weights, both float32 [N, parts, H]."""
    (count, heads, dim), device = out.shape, out.device
    mixed = torch.empty((count, parts, heads, dim), dtype=torch.float32, device=device)
    high, total = torch.empty((2, count, parts, heads), dtype=torch.float32, device=device)
    return mixed, high, total


@triton.jit
def _join_parts(
    part_in, high_in, total_in, sinks, positions, table, out, parts, H,
    DIM: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """`BLOCK` pairs of a head's output, turned back if SPAN is not 0."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    d = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    first = n * parts * H + h
    every = tl.arange(0, PARTS)
    sink, angles = tl.load(sinks + h), table
    if SPAN > 0:  # positions are older than the kernel in front
        angles = table + tl.load(positions + n, cache_modifier=".cg").to(tl.int64) * SPAN
    follow(CHAINED)
    highs = tl.load(high_in + first + every * H, mask=every < parts, other=float("-inf"))
    totals = tl.load(total_in + first + every * H, mask=every < parts, other=0)
    shift = tl.maximum(tl.max(highs, 0), sink)  # finite: sinks are
    total = tl.sum(totals * tl.exp(highs - shift), 0) + tl.exp(sink - shift)
    mixed = tl.zeros((BLOCK, 2), tl.float32)
    for begin in range(0, parts, AHEAD):
        values, shares = (), ()  # all are asked for before one is used
        for nth in tl.static_range(AHEAD):
            cell, there = first + (begin + nth) * H, begin + nth < parts
            own = tl.load(total_in + cell, mask=there, other=0)
            width = tl.where(own == 0, 0, DIM)  # 0: it was never written
            values += (tl.load(part_in + cell * DIM + d, mask=d < width, other=0),)
            high = tl.load(high_in + cell, mask=there, other=float("-inf"))
            shares += (tl.exp(high - shift),)
        for nth in tl.static_range(AHEAD):
            mixed += values[nth] * shares[nth]
    mixed = mixed / total
    if SPAN > 0:
        first, second = tl.split(mixed)
        low, high = turn_tail(first, second, angles, pair, DIM, -1.0, SPAN)
        mixed = tl.join(low, high)
    tl.store(out + (n * H + h) * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)


def join(mixed: Tensor, high: Tensor, total: Tensor, close: Close, out: Tensor) -> None:
    """out [N, H, D] of what `room_for` describes; a part whose sum is 0 need not be written."""
    (count, parts, heads, dim) = mixed.shape
    pairs = min(64, max(16, triton.next_power_of_2(dim)) // 2)
    most = triton.next_power_of_2(max(1, parts))
    _join_parts[(count, heads, triton.cdiv(dim, 2 * pairs))](
        mixed, high, total, close.sinks, close.positions, close.table, out, parts, heads,
        DIM=dim, SPAN=close.span, PARTS=most, AHEAD=min(AHEAD, most), BLOCK=pairs,
        CHAINED=CHAINED, num_warps=1, launch_pdl=CHAINED,
    )  # fmt: skip


def attend_in_parts(
    attend: Callable[..., None],
    query: Tensor,  # [N, H, D]
    own: tuple[Any, Tensor],
    more: tuple[Any, Tensor],
    close: Close,
    out: Tensor,  # [N, H, D]
    parts: int,
) -> None:
    """`attend(query, own, more, rooms)` for pieces of whole queries, joined into `out`.

    `own`, `more`: a cache, and the slots int32 [N, K] that each query lists of it.
    """
    step = max(1, SCRATCH // max(1, parts * query.shape[1] * query.shape[2]))
    for at in range(0, query.shape[0], step):
        piece = slice(at, at + step)
        rooms = room_for(out[piece], parts)
        attend(query[piece], (own[0], own[1][piece]), (more[0], more[1][piece]), rooms)
        ends = Close(close.sinks, close.positions[piece], close.table, close.span)
        join(*rooms, ends, out[piece])
