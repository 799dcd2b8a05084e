# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks over two lists of rows, split over lanes as sparse MLA is.

A part is `PART` lanes of one list, the window's parts before the entries'; they are joined in this
order, and the sink with them. So the order of a sum depends on the number of lanes alone. A part
without a live lane reads nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.keys import turn_tail
from freewheel.ops.cuda.native import SHARED, Kernel, lacking
from freewheel.ops.registry import SPECIFICATIONS, implement

PART = 64
"""Lanes of one part. There are few: a window and what was picked."""

STEP, WARPS, STAGES = 64, 4, 1

HEADS = 16
"""Heads of one program: the height of a matrix tile."""

SCRATCH = 1 << 24
"""Floats of unjoined parts held at once; wider rectangles go through in pieces of whole queries."""


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


@triton.jit
def join_parts(
    part_in, high_in, total_in, sinks, positions, table, out, parts, H,
    DIM: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """`BLOCK` pairs of a head's output, turned back if SPAN is not 0."""
    follow(CHAINED)
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    d = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    first = n * parts * H + h
    every = tl.arange(0, PARTS)
    highs = tl.load(high_in + first + every * H, mask=every < parts, other=float("-inf"))
    totals = tl.load(total_in + first + every * H, mask=every < parts, other=0)
    sink = tl.load(sinks + h)
    shift = tl.maximum(tl.max(highs, 0), sink)  # finite: sinks are
    total = tl.sum(totals * tl.exp(highs - shift), 0) + tl.exp(sink - shift)
    mixed = tl.zeros((BLOCK, 2), tl.float32)
    for part in range(parts):
        cell = first + part * H
        width = tl.where(tl.load(total_in + cell) == 0, 0, DIM)  # 0: it was never written
        value = tl.load(part_in + cell * DIM + d, mask=d < width, other=0)
        mixed += value * tl.exp(tl.load(high_in + cell) - shift)
    mixed = mixed / total
    if SPAN > 0:
        first, second = tl.split(mixed)
        angles = table + tl.load(positions + n).to(tl.int64) * SPAN
        low, high = turn_tail(first, second, angles, pair, DIM, -1.0, SPAN)
        mixed = tl.join(low, high)
    tl.store(out + (n * H + h) * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)


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
    return _attend(*args)


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
) -> Tensor:
    args = (query, keys, slots, entries, entry_slots, sinks, scale)
    if not _is_plain(query, keys, entries):
        return SPECIFICATIONS["window_attention"](*args, positions, rope_table)
    return _attend(*args, (positions.contiguous(), rope_table))


def _attend(
    query: Tensor,
    keys: Tensor,
    slots: Tensor,
    entries: Tensor,
    entry_slots: Tensor,
    sinks: Tensor,
    scale: float,
    turned: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`turned`: positions and rope table, where the output is turned back."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    parts = triton.cdiv(slots.shape[2], PART) + triton.cdiv(entry_slots.shape[2], PART)
    step = max(1, SCRATCH // max(1, parts * query.shape[2] * query.shape[3]))
    positions, table = turned or (slots, sinks)
    split = (query, slots, entry_slots, positions, out)
    pieces = [t.flatten(0, 1).contiguous().split(step) for t in split]
    for own, lanes, picks, places, target in zip(*pieces, strict=True):
        span = table.shape[1] if turned else 0
        _attend_piece(
            own, (keys, lanes), (entries, picks), sinks, scale, (places, table, span), target
        )
    return out


def takes(query: Tensor) -> bool:
    """Whether `KERNEL` attends for query [N, H, D]."""
    heads, dim = query.shape[1:]
    fits = query.dtype == torch.bfloat16 and heads <= MOST_HEADS and dim % DIMENSIONS == 0
    return fits and shared_bytes(dim) <= SHARED and query.is_cuda and lacking() is None


def shared_bytes(dim: int) -> int:
    """Of a block of `KERNEL`: rows of keys and queries, each 32 bytes apart from the next."""
    return 64 + (PART + MOST_HEADS) * (2 * dim + 32)


def _attend_piece(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    more: tuple[Tensor, Tensor],
    sinks: Tensor,
    scale: float,
    turned: tuple[Tensor, Tensor, int],
    out: Tensor,
) -> None:
    """query [N, H, D], own and more: a cache, and its slots [N, K] -> out [N, H, D]"""
    (count, heads, dim), width, others = query.shape, own[1].shape[1], more[1].shape[1]
    key_parts = triton.cdiv(width, PART)
    parts = key_parts + triton.cdiv(others, PART)
    mixed = torch.empty((count, parts, heads, dim), dtype=torch.float32, device=out.device)
    high, total = torch.empty((2, count, parts, heads), dtype=torch.float32, device=out.device)
    block = max(16, triton.next_power_of_2(dim))
    if takes(query):
        KERNEL.launch(
            count * parts, 128, shared_bytes(dim),
            query, *own, *more, mixed, high, total, scale, width, others, key_parts, parts, heads,
            DIM=dim,
        )  # fmt: skip
    else:
        _attend_part[(count, parts, triton.cdiv(heads, HEADS))](
            query, *own, *more, mixed, high, total, scale, width, others, key_parts, heads,
            DIM=dim, BLOCK=block, PART=PART, STEP=STEP if query.dtype == torch.bfloat16 else 16,
            HEADS=HEADS, CHAINED=CHAINED, num_warps=WARPS, num_stages=STAGES, launch_pdl=CHAINED,
        )  # fmt: skip
    positions, table, span = turned
    pairs = min(64, block // 2)
    join_parts[(count, heads, triton.cdiv(dim, 2 * pairs))](
        mixed, high, total, sinks, positions, table, out, parts, heads,
        DIM=dim, SPAN=span, PARTS=triton.next_power_of_2(max(1, parts)), BLOCK=pairs,
        CHAINED=CHAINED, num_warps=1, launch_pdl=CHAINED,
    )  # fmt: skip
