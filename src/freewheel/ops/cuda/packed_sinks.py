# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks over packed keys and entries: `ops.cuda.sinks` with another load.

Scales are powers of two, so a key becomes bfloat16 without rounding and the rest is the same.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda import window_heads
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.packed_attention import in_registers
from freewheel.ops.cuda.packing import power_of, views
from freewheel.ops.cuda.sink_parts import Close, Rooms, attend_in_parts
from freewheel.ops.cuda.sinks import HEADS, PART, STAGES, STEP, mix_in, parts_of
from freewheel.ops.cuda.streaming import widen_fp8
from freewheel.ops.registry import SPECIFICATIONS, implement

TILE = 64
"""Values of a key that one scale covers."""

WARPS = 8
"""With four, what a program of 512 values holds would not fit into their registers."""


@triton.jit
def _load_keys(
    codes, plain, slot, seen, page_rows,
    DIM: tl.constexpr, SPAN: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[STEP, BLOCK] of packed keys, bfloat16; without ASM float32."""
    scaled: tl.constexpr = DIM - SPAN
    width: tl.constexpr = DIM + SPAN
    tiles: tl.constexpr = BLOCK // TILE
    d, tile = tl.arange(0, BLOCK), tl.arange(0, tiles)
    page, row = slot // page_rows, slot % page_rows
    start = (page * page_rows * BYTES + row * width)[:, None]
    there = seen[:, None]
    code = tl.load(codes + start + d[None, :], mask=there & (d < scaled)[None, :], other=0)
    place = page * page_rows * BYTES + page_rows * width + row * (BYTES - width)
    power = tl.load(
        codes + place[:, None] + tile[None, :],
        mask=there & (tile < scaled // TILE)[None, :], other=127,
    ).to(tl.int32)  # fmt: skip
    value = widen_fp8(code, ASM)
    factor = power_of(power).to(value.dtype)
    value = tl.reshape(value, (STEP, tiles, TILE)) * factor[:, :, None]
    value = tl.reshape(value, (STEP, BLOCK))
    tail = plain + start // 2 - scaled // 2 + d[None, :]
    kept = (d >= scaled) & (d < DIM)
    turned = tl.load(tail, mask=there & kept[None, :], other=0).to(value.dtype)
    return tl.where(kept[None, :], turned, value)


@triton.jit(do_not_specialize=["K", "E", "key_parts", "key_rows", "entry_rows"])
def _attend_part(
    query, key_codes, key_plain, slots, entry_codes, entry_plain, entry_slots, part_out, high_out,
    total_out, scale, K, E, key_parts, key_rows, entry_rows, H,
    DIM: tl.constexpr, SPAN: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr,
    ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    n, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    h = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    real = h < H
    cell = (n * parts + part) * H + h
    codes, plain, page_rows = key_codes, key_plain, key_rows
    lanes, left = slots + n * K + part * PART, K - part * PART
    if part >= key_parts:
        first = (part - key_parts) * PART
        codes, plain, page_rows = entry_codes, entry_plain, entry_rows
        lanes, left = entry_slots + n * E + first, E - first
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
            key = _load_keys(
                codes, plain, slot.to(tl.int64), seen, page_rows,
                DIM, SPAN, BYTES, BLOCK, TILE, STEP, ASM,
            )  # fmt: skip
            high, total, mixed = mix_in(q, key, seen, scale, high, total, mixed)
        tl.store(high_out + cell, high, mask=real)
        tl.store(total_out + cell, total, mask=real)
        target = part_out + cell[:, None] * DIM + d[None, :]
        tl.store(target, mixed, mask=real[:, None] & inside)


@implement("fp8_window_attention", "cuda")
def fp8_window_attention(
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
    if query.dtype == torch.float64:
        return SPECIFICATIONS["fp8_window_attention"](
            query, keys, slots, entries, entry_slots, sinks, scale, positions, rope_table
        )
    out, span = torch.empty_like(query, memory_format=torch.contiguous_format), rope_table.shape[1]
    flat, target = query.flatten(0, 1).contiguous(), out.flatten(0, 1)
    lanes, picks = (own.flatten(0, 1).contiguous() for own in (slots, entry_slots))
    close = Close(sinks, positions.flatten().contiguous(), rope_table, span)
    if window_heads.serves(query, (keys, entries), span, fixed):
        own, more = (window_heads.packed_rows(cache) for cache in (keys, entries))
        window_heads.attend(flat, (own, lanes), (more, picks), scale, close, target, fixed)
        return out
    attend, parts = partial(_attend, scale=scale, span=span), parts_of(lanes, picks)
    attend_in_parts(attend, flat, (keys, lanes), (entries, picks), close, target, parts)
    return out


def _attend(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    more: tuple[Tensor, Tensor],
    rooms: Rooms,
    scale: float,
    span: int,
) -> None:
    """query [N, H, D], own and more: a packed cache, and its slots [N, K] -> `rooms`"""
    (count, heads, dim), (keys, lanes), (entries, picks) = query.shape, own, more
    _attend_part[(count, rooms[0].shape[1], triton.cdiv(heads, HEADS))](
        query, *views(keys)[:2], lanes, *views(entries)[:2], picks, *rooms, scale,
        lanes.shape[1], picks.shape[1], parts_of(lanes), keys.shape[1], entries.shape[1], heads,
        DIM=dim, SPAN=span, BYTES=keys.shape[2], BLOCK=triton.next_power_of_2(dim), TILE=TILE,
        PART=PART, STEP=STEP if query.dtype == torch.bfloat16 else 16, HEADS=HEADS,
        ASM=in_registers(query), CHAINED=CHAINED, num_warps=WARPS, num_stages=STAGES,
        launch_pdl=CHAINED,
    )  # fmt: skip
