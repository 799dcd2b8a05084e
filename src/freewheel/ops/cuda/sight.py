# SPDX-License-Identifier: Apache-2.0
"""What a rectangle's queries see, and which windows it closes: once a rectangle, for all layers.

Pages are read through the table's row, and only where a lane is alive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.compressed import closings
from freewheel.ops.registry import implement

LANES = 1024
"""Lanes of one program, at most."""


@triton.jit
def _slots_of(positions, live, table, row, P, PAGE):
    """int32 slots of int32 positions of a row; -1 where not live."""
    page = tl.load(table + row.to(tl.int64) * P + positions // PAGE, mask=live, other=0)
    return tl.where(live, page * PAGE + positions % PAGE, -1)


@triton.jit
def _window_slots(table, rows, kv_lens, out, W, P, PAGE, WINDOW, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    position = tl.load(kv_lens + query) - WINDOW + lane
    live = (position >= 0) & (lane < WINDOW)
    slot = _slots_of(position, live, table, tl.load(rows + query // W), P, PAGE)
    tl.store(out + query * WINDOW + lane, slot, mask=lane < WINDOW)


@implement("window_slots", "cuda")
def window_slots(
    page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, window: int
) -> Tensor:
    out = kv_lens.new_empty((*kv_lens.shape, window))
    if out.numel():
        _window_slots[(kv_lens.numel(),)](
            page_table, rows, kv_lens.contiguous(), out, kv_lens.shape[1], page_table.stride(0),
            page_size, window, BLOCK=triton.next_power_of_2(window), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _entry_slots(table, rows, entry_lens, out, W, P, PAGE, S, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (entry < tl.load(entry_lens + query)) & (entry < S)
    slot = _slots_of(entry, live, table, tl.load(rows + query // W), P, PAGE)
    tl.store(out + query * S + entry, slot, mask=entry < S)


@implement("entry_slots", "cuda")
def entry_slots(page_table: Tensor, rows: Tensor, entry_lens: Tensor, page_rows: int) -> Tensor:
    length = page_table.shape[1] * page_rows
    out = entry_lens.new_empty((*entry_lens.shape, length))
    if out.numel():
        block = min(LANES, triton.next_power_of_2(length))
        _entry_slots[(entry_lens.numel(), triton.cdiv(length, block))](
            page_table, rows, entry_lens.contiguous(), out, entry_lens.shape[1],
            page_table.stride(0), page_rows, length, BLOCK=block, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _plan_closings(
    positions, kv_lens, rows, raw_table, entry_table, windows_out, write_out, raw_out,
    W, P, Q, RAW_PAGE, PAGE_ROWS, RATIO, SPAN, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    b, k, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, BLOCK_W)
    ends = tl.zeros((BLOCK_W,), tl.int32)
    for at in range(0, W, BLOCK_W):
        lens = tl.load(kv_lens + b * W + at + column, mask=at + column < W, other=0)
        ends = tl.maximum(ends, lens)
    window = tl.load(positions + b * W) // RATIO + k
    live = window < tl.max(ends, 0) // RATIO
    row, cell = tl.load(rows + b), b * count + k
    tl.store(windows_out + cell, tl.where(live, window, -1))
    entry = _slots_of(window, live, entry_table, row, Q, PAGE_ROWS)
    tl.store(write_out + cell, tl.where(live, entry, 0).to(tl.int64))
    lane = tl.arange(0, BLOCK_S)
    source = (window + 1) * RATIO - SPAN + lane
    seen = live & (source >= 0) & (lane < SPAN)
    slot = _slots_of(source, seen, raw_table, row, P, RAW_PAGE)
    tl.store(raw_out + cell * SPAN + lane, slot, mask=lane < SPAN)


@implement("plan_closings", "cuda")
def plan_closings(
    positions: Tensor,
    kv_lens: Tensor,
    rows: Tensor,
    raw_table: Tensor,
    entry_table: Tensor,
    raw_page_size: int,
    page_rows: int,
    ratio: int,
    span: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, width = positions.shape
    shape = batch, closings(width, ratio)
    windows, raw_slots = rows.new_empty(shape), rows.new_empty((*shape, span))
    write_slots = rows.new_empty(shape, dtype=torch.int64)
    if windows.numel():
        _plan_closings[shape](
            positions.contiguous(), kv_lens.contiguous(), rows, raw_table, entry_table,
            windows, write_slots, raw_slots, width, raw_table.stride(0), entry_table.stride(0),
            raw_page_size, page_rows, ratio, span,
            BLOCK_W=min(LANES, triton.next_power_of_2(width)),
            BLOCK_S=triton.next_power_of_2(span), num_warps=1,
        )  # fmt: skip
    return windows, write_slots, raw_slots
