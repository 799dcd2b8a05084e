# SPDX-License-Identifier: Apache-2.0
"""Stores of packed keys and entries, fused with what else the same launch does.

As `ops.cuda.keys` and `ops.cuda.entries`, with the row quantised in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.dense import warps_for
from freewheel.ops.cuda.entries import ELEMENTS, STEP, copy_raw, mix_window, warps_of
from freewheel.ops.cuda.keys import turn_one, turned
from freewheel.ops.cuda.packing import codes_of, largest_of, power_code, power_of, tile_scale, views
from freewheel.ops.registry import SPECIFICATIONS, implement

TILE = 64
"""Values of a key that one scale covers."""


@triton.jit
def _pack_key(
    pairs, codes, plain, slot, page_rows,
    DIM: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Quantise and store a key of DIM elements, float32 [BLOCK // 2, 2]."""
    scaled: tl.constexpr = DIM - SPAN
    width: tl.constexpr = DIM + SPAN
    tiles: tl.constexpr = BLOCK // TILE
    value = tl.reshape(pairs, (tiles, TILE))
    tile = tl.arange(0, tiles)
    lane = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    code = power_code(largest_of(value, 1))
    factor = tl.broadcast_to(power_of(code)[:, None], (tiles, TILE))
    page, row = slot // page_rows, slot % page_rows
    start = page * page_rows * BYTES + row * width
    tl.store(codes + start + lane, codes_of(tl.div_rn(value, factor)), mask=lane < scaled)
    tail = plain + start // 2 - scaled // 2 + lane
    tl.store(tail, value.to(tl.bfloat16), mask=(lane >= scaled) & (lane < DIM))
    room: tl.constexpr = BYTES - width
    place = codes + page * page_rows * BYTES + page_rows * width + row * room + tile
    code = tl.where(tile < scaled // TILE, code, 0)
    tl.store(place, code.to(tl.uint8), mask=tile < room)


@triton.jit
def _pack_index_key(pairs, codes, scales, slot, page_rows, DIM: tl.constexpr):
    """Quantise and store an index key of DIM elements, float32 [DIM // 2, 2]."""
    value = tl.reshape(pairs, (DIM,))
    factor = tile_scale(largest_of(value, 0))
    page, row = slot // page_rows, slot % page_rows
    start = page * page_rows * (DIM + 4) + row * DIM
    code = codes_of(tl.div_rn(value, factor + tl.zeros_like(value)))
    tl.store(codes + start + tl.arange(0, DIM), code)
    tail = page * page_rows * ((DIM + 4) // 4) + page_rows * (DIM // 4) + row
    tl.store(scales + tail, factor)


@triton.jit
def _place(
    query, out, key, codes, plain, weight, positions, table, slots, query_eps, key_eps, page_rows,
    H,
    DIM: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Heads 0 .. H - 1 of a token's query, and behind them its key."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = table + tl.load(positions + token).to(tl.int64) * SPAN
    if head < H:
        at = (token * H + head) * DIM
        turn_one(
            query + at, out + at, weight, angles, query_eps, 1.0, DIM, SPAN, True, False, BLOCK // 2
        )
    else:
        pairs = turned(
            key + token * DIM, weight, angles, key_eps, 1.0, DIM, SPAN, True, True, BLOCK // 2
        )
        slot = tl.load(slots + token)
        _pack_key(pairs, codes, plain, slot, page_rows, DIM, SPAN, TILE, BLOCK, BYTES)


@implement("fp8_place_heads", "cuda")
def fp8_place_heads(
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
    if torch.float64 in (query.dtype, key.dtype):
        args = (query_eps, key, norm_weight, key_eps, positions, rope_table, slots)
        return SPECIFICATIONS["fp8_place_heads"](cache, query, *args)
    query, key = query.contiguous(), key.contiguous()
    (batch, width, heads, dim), out = query.shape, torch.empty_like(query)
    block, (codes, plain, _) = triton.next_power_of_2(dim), views(cache)
    if key.numel():
        _place[(batch * width, heads + 1)](
            query, out, key, codes, plain, norm_weight, positions.contiguous(), rope_table,
            slots.contiguous(), query_eps, key_eps, cache.shape[1], heads,
            DIM=dim, SPAN=rope_table.shape[1], TILE=TILE, BLOCK=block, BYTES=cache.shape[2],
            num_warps=warps_for(block),
        )  # fmt: skip
    return out


@triton.jit
def _store_entries(
    codes, plain, scales, raw, values, positions, slots, bias, weight, table, windows,
    write_slots, raw_slots, eps, W, K, cells, C, page_rows,
    D: tl.constexpr, RATIO, SPAN: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, COPY: tl.constexpr, BYTES: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """Programs of windows first, then of pieces of raw rows. INDEX: entries of an indexer."""
    cell = tl.program_id(0).to(tl.int64)
    if cell < cells:
        if tl.program_id(1) == 0:
            row, window = cell // K, tl.load(windows + cell)
            if window >= 0:
                pairs = mix_window(
                    raw, bias, weight, table, window, raw_slots, values + row * W * 2 * C,
                    tl.load(positions + row * W), cell, eps, C, D, RATIO, SPAN, ROPE, True, BLOCK,
                    STEP,
                )  # fmt: skip
                slot = tl.load(write_slots + cell)
                if INDEX:
                    _pack_index_key(pairs, codes, scales, slot, page_rows, D)
                else:
                    _pack_key(pairs, codes, plain, slot, page_rows, D, ROPE, TILE, BLOCK, BYTES)
    else:
        copy_raw(raw, values, slots, cell - cells, 2 * C, COPY)


def _store(
    cache: Tensor,
    raw: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    rope_table: Tensor,
    planned: tuple[Tensor, Tensor, Tensor],
    index: bool,
) -> None:
    (ratio, channels), (dim,), span = bias.shape, norm_weight.shape, planned[2].shape[2]
    block, (_, width), cells = triton.next_power_of_2(dim), slots.shape, planned[0].numel()
    piece = min(ELEMENTS, triton.next_power_of_2(2 * channels))
    _store_entries[(cells + slots.numel(), triton.cdiv(2 * channels, piece))](
        *views(cache), raw, values.contiguous(), positions.contiguous(), slots.contiguous(), bias,
        norm_weight, rope_table, *(one.contiguous() for one in planned), eps, width,
        planned[0].shape[1], cells, channels, cache.shape[1],
        D=dim, RATIO=ratio, SPAN=span, ROPE=rope_table.shape[1], TILE=TILE, BLOCK=block,
        STEP=min(STEP, triton.next_power_of_2(span)), COPY=piece, BYTES=cache.shape[2],
        INDEX=index, num_warps=warps_of(block),
    )  # fmt: skip


def _is_plain(raw: Tensor, values: Tensor) -> bool:
    """Whether the kernels serve for raw rows of this dtype."""
    return raw.dtype == values.dtype == torch.float32


@implement("fp8_store_entries", "cuda")
def fp8_store_entries(
    cache: Tensor,
    raw: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    rope_table: Tensor,
    windows: Tensor,
    write_slots: Tensor,
    raw_slots: Tensor,
) -> None:
    planned = (windows, write_slots, raw_slots)
    args = (cache, raw, values, positions, slots, bias, norm_weight, eps, rope_table)
    if not _is_plain(raw, values):
        SPECIFICATIONS["fp8_store_entries"](*args, *planned)
    elif slots.numel():
        _store(*args, planned, False)


@implement("fp8_store_index_entries", "cuda")
def fp8_store_index_entries(
    cache: Tensor,
    raw: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    rope_table: Tensor,
    windows: Tensor,
    write_slots: Tensor,
    raw_slots: Tensor,
) -> None:
    planned = (windows, write_slots, raw_slots)
    args = (cache, raw, values, positions, slots, bias, norm_weight, eps, rope_table)
    if not _is_plain(raw, values):
        SPECIFICATIONS["fp8_store_index_entries"](*args, *planned)
    elif slots.numel():
        _store(*args, planned, True)
