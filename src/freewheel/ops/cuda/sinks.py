# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks over two lists of rows, split over lanes as sparse MLA is.

A part is `PART` lanes of one list, the window's parts before the entries'; they are joined in this
order, and the sink with them. So the order of a sum depends on the number of lanes alone. A part
without a live lane reads nothing.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda import window_heads
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.native import SHARED, Kernel, lacking
from freewheel.ops.cuda.sink_parts import Close, Rooms, attend_in_parts
from freewheel.ops.registry import SPECIFICATIONS, implement

PART = 64
"""Lanes of one part. There are few: a window and what was picked."""

STEP, WARPS, STAGES = 64, 4, 1

HEADS = 16
"""Heads of one program: the height of a matrix tile."""

KERNEL = Kernel("attend_parts", "ppppppppfiiiii")

MOST_HEADS, DIMENSIONS = 8, 256
"""Of `KERNEL`: heads at most, and what divides a head's dimension."""


@triton.jit
def mix_in(q, key, seen, scale, high, total, mixed):
    """(highest score, sum of weights, weighted sum) with one more step's keys, [STEP, BLOCK]."""
    score = tl.dot(q, tl.trans(key), input_precision="ieee")  # [HEADS, STEP]
    score = tl.where(seen[None, :], score * scale, float("-inf"))
    highest = tl.maximum(high, tl.max(score, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(score - shift[:, None])
    decay = tl.exp(high - shift)
    total = total * decay + tl.sum(weight, 1)
    mixed = mixed * decay[:, None]
    mixed += tl.dot(weight.to(key.dtype), key, input_precision="ieee")
    return highest, total, mixed


@triton.jit(do_not_specialize=["K", "E", "key_parts"])
def _attend_part(
    query, keys, slots, entries, entry_slots, part_out, high_out, total_out, scale, K, E,
    key_parts, H,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr,
    HEADS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    n, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    h = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    real = h < H
    cell = (n * parts + part) * H + h
    cache, lanes, left = keys, slots + n * K + part * PART, K - part * PART
    if part >= key_parts:
        first = (part - key_parts) * PART
        cache, lanes, left = entries, entry_slots + n * E + first, E - first
    every = tl.arange(0, PART)
    live = tl.load(lanes + every, mask=every < left, other=-1) >= 0
    if tl.sum(live.to(tl.int32), 0) == 0:
        tl.store(high_out + cell, float("-inf"), mask=real)
        tl.store(total_out + cell, 0.0, mask=real)
    else:
        d = tl.arange(0, BLOCK)
        inside = (d < DIM)[None, :]
        own = query + (n * H + h)[:, None] * DIM + d[None, :]
        q = tl.load(own, mask=real[:, None] & inside, other=0)
        high = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        mixed = tl.zeros((HEADS, BLOCK), tl.float32)
        for at in range(0, PART, STEP):
            lane = at + tl.arange(0, STEP)
            slot = tl.load(lanes + lane, mask=lane < left, other=-1)
            seen = slot >= 0
            line = cache + slot.to(tl.int64)[:, None] * DIM + d[None, :]
            key = tl.load(line, mask=seen[:, None] & inside, other=0)
            high, total, mixed = mix_in(q, key, seen, scale, high, total, mixed)
        tl.store(high_out + cell, high, mask=real)
        tl.store(total_out + cell, total, mask=real)
        target = part_out + cell[:, None] * DIM + d[None, :]
        tl.store(target, mixed, mask=real[:, None] & inside)


def _is_plain(query: Tensor, keys: Tensor, entries: Tensor) -> bool:
    """Whether the kernels serve for these dtypes and widths."""
    same = query.dtype == keys.dtype == entries.dtype
    return same and query.dtype != torch.float64 and query.shape[3] % 2 == 0


@implement("sink_attention", "cuda")
def sink_attention(
    query: Tensor,
    keys: Tensor,
    slots: Tensor,
    entries: Tensor,
    entry_slots: Tensor,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    args = (query, keys, slots, entries, entry_slots, sinks, scale)
    if not _is_plain(query, keys, entries):
        return SPECIFICATIONS["sink_attention"](*args)
    return _attend(*args, None, True)


@implement("window_attention", "cuda")
def window_attention(
    query: Tensor,
    keys: Tensor,
    slots: Tensor,
    entries: Tensor,
    entry_slots: Tensor,
    sinks: Tensor,
    scale: float,
    positions: Tensor,
    rope_table: Tensor,
    fixed: bool = False,
) -> Tensor:
    args = (query, keys, slots, entries, entry_slots, sinks, scale)
    if not _is_plain(query, keys, entries):
        return SPECIFICATIONS["window_attention"](*args, positions, rope_table)
    return _attend(*args, (positions, rope_table), fixed)


def _attend(
    query: Tensor,
    keys: Tensor,
    slots: Tensor,
    entries: Tensor,
    entry_slots: Tensor,
    sinks: Tensor,
    scale: float,
    turned: tuple[Tensor, Tensor] | None,
    fixed: bool,
) -> Tensor:
    """`turned`: positions and rope table, where the output is turned back."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    flat, target = query.flatten(0, 1).contiguous(), out.flatten(0, 1)
    lanes, picks = (own.flatten(0, 1).contiguous() for own in (slots, entry_slots))
    positions, table = turned or (slots, sinks)
    span = table.shape[1] if turned else 0
    close = Close(sinks, positions.flatten().contiguous(), table, span)
    if window_heads.serves(query, (keys, entries), span, fixed):
        own, more = (window_heads.plain_rows(cache) for cache in (keys, entries))
        window_heads.attend(flat, (own, lanes), (more, picks), scale, close, target, fixed)
        return out

    attend = partial(_attend_parts, scale=scale)
    parts = parts_of(lanes, picks)
    attend_in_parts(attend, flat, (keys, lanes), (entries, picks), close, target, parts)
    return out


def parts_of(*lists: Tensor) -> int:
    """Parts of `PART` lanes of lists int32 [N, K], each by itself."""
    return sum(triton.cdiv(own.shape[1], PART) for own in lists)


def takes(query: Tensor) -> bool:
    """Whether `KERNEL` attends for query [N, H, D]."""
    heads, dim = query.shape[1:]
    fits = query.dtype == torch.bfloat16 and heads <= MOST_HEADS and dim % DIMENSIONS == 0
    return fits and shared_bytes(dim) <= SHARED and query.is_cuda and lacking() is None


def shared_bytes(dim: int) -> int:
    """Of a block of `KERNEL`: rows of keys and queries, each 32 bytes apart from the next."""
    return 64 + (PART + MOST_HEADS) * (2 * dim + 32)


def _attend_parts(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    more: tuple[Tensor, Tensor],
    rooms: Rooms,
    scale: float,
) -> None:
    """query [N, H, D], own and more: a cache, and its slots [N, K] -> `rooms`"""
    (count, heads, dim), width, others = query.shape, own[1].shape[1], more[1].shape[1]
    key_parts, parts = parts_of(own[1]), rooms[0].shape[1]
    if takes(query):
        KERNEL.launch(
            count * parts, 128, shared_bytes(dim),
            query, *own, *more, *rooms, scale, width, others, key_parts, parts, heads, DIM=dim,
        )  # fmt: skip
    else:
        _attend_part[(count, parts, triton.cdiv(heads, HEADS))](
            query, *own, *more, *rooms, scale, width, others, key_parts, heads,
            DIM=dim, BLOCK=max(16, triton.next_power_of_2(dim)), PART=PART,
            STEP=STEP if query.dtype == torch.bfloat16 else 16, HEADS=HEADS, CHAINED=CHAINED,
            num_warps=WARPS, num_stages=STAGES, launch_pdl=CHAINED,
        )  # fmt: skip
