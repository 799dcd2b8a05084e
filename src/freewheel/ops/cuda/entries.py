# SPDX-License-Identifier: Apache-2.0
"""Raw rows into the cache, and entries out of them.

A window is a program. Where none closes, which is the rule, it ends at once; else it reads its raw
rows once, a few at a time in ascending order, with the running maximum of a channel's gates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.keys import turn_tail
from freewheel.ops.registry import SPECIFICATIONS, implement

ELEMENTS = 1024
"""Of a raw row that one program copies."""

STEP = 8
"""Raw rows mixed at a time, at most."""


@implement("project_raw", "cuda")
def project_raw(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return SPECIFICATIONS["project_raw"](x, weight)
    flat = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32)
    return flat.view(*x.shape[:-1], weight.shape[0])


@triton.jit
def copy_raw(raw, values, slots, token, D, BLOCK: tl.constexpr):
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + token * D + lane, mask=lane < D)
    target = raw + tl.load(slots + token) * D + lane
    tl.store(target, value.to(raw.dtype.element_ty), mask=lane < D)


@triton.jit
def _store_raw(raw, values, slots, D, BLOCK: tl.constexpr):
    copy_raw(raw, values, slots, tl.program_id(0).to(tl.int64), D, BLOCK)


@implement("store_raw", "cuda")
def store_raw(raw: Tensor, values: Tensor, slots: Tensor) -> None:
    if slots.numel():
        dim = values.shape[2]
        block = min(ELEMENTS, triton.next_power_of_2(dim))
        _store_raw[(slots.numel(), triton.cdiv(dim, block))](
            raw, values.contiguous(), slots.contiguous(), dim, BLOCK=block, num_warps=2
        )


@triton.jit
def mix_window(
    raw, bias, weight, table, window, raw_slots, values, first_fresh, cell, eps, C, D, RATIO,
    SPAN: tl.constexpr, ROPE: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK // 2, 2]: the entry of one window, in pairs.

    FRESH: rows of positions from `first_fresh` on lie in `values`, one after the other.
    """
    return mix_parts(
        raw, bias, weight, table, window, raw_slots, values, 2 * C, 0, first_fresh, cell, eps,
        C, D, RATIO, SPAN, ROPE, FRESH, 1, BLOCK, STEP,
    )  # fmt: skip


@triton.jit
def mix_parts(
    raw, bias, weight, table, window, raw_slots, values, pitch, apart, first_fresh, cell, eps,
    C, D, RATIO,
    SPAN: tl.constexpr, ROPE: tl.constexpr, FRESH: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The same of fresh rows `pitch` apart, each the sum of PARTS that are `apart` elements
    apart."""
    d = tl.arange(0, BLOCK)
    inside = (d < D)[None, :]
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mixed = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, SPAN, STEP):
        nth = at + tl.arange(0, STEP)
        slot = tl.load(raw_slots + cell * SPAN + nth, mask=nth < SPAN, other=-1)
        live = (slot >= 0)[:, None]
        # Channels of an earlier window come first, where there are two for each element.
        channel = tl.where(nth >= RATIO, C - D, 0)[:, None] + d[None, :]
        line = raw + slot.to(tl.int64)[:, None] * (2 * C) + channel
        if FRESH:
            ahead = (window + 1) * RATIO - SPAN + nth - first_fresh
            new = values + ahead.to(tl.int64)[:, None] * pitch + channel
            fresh = live & (ahead >= 0)[:, None] & inside
            stored = live & (ahead < 0)[:, None] & inside
            kv = tl.load(line, mask=stored, other=0)
            gate = tl.load(line + C, mask=stored, other=0)
            for part in tl.static_range(PARTS):
                kv += tl.load(new + part * apart, mask=fresh, other=0)
                gate += tl.load(new + part * apart + C, mask=fresh, other=0)
        else:
            kv = tl.load(line, mask=live & inside, other=0)
            gate = tl.load(line + C, mask=live & inside, other=0)
        own = bias + (nth % RATIO)[:, None] * C + channel
        gate += tl.load(own, mask=live & inside, other=0)
        gate = tl.where(live, gate, float("-inf"))
        highest = tl.maximum(high, tl.max(gate, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.exp(gate - shift[None, :])
        decay = tl.exp(high - shift)
        total = total * decay + tl.sum(share, 0)
        mixed = mixed * decay + tl.sum(share * kv, 0)
        high = highest
    mixed = tl.where(d < D, mixed / total, 0.0)
    mixed = mixed * (1 / tl.sqrt(tl.sum(mixed * mixed, 0) / D + eps))
    mixed = mixed * tl.load(weight + d, mask=d < D, other=0).to(tl.float32)
    first, second = tl.split(tl.reshape(mixed, (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)
    angles = table + (window * RATIO).to(tl.int64) * ROPE
    low, turned = turn_tail(first, second, angles, pair, D, 1.0, ROPE)
    return tl.join(low, turned)


@triton.jit
def _mix(
    cache, raw, bias, weight, table, windows, write_slots, raw_slots, values, first_fresh, cell,
    eps, C, D, RATIO,
    SPAN: tl.constexpr, ROPE: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    window = tl.load(windows + cell)
    if window >= 0:
        entry = mix_window(
            raw, bias, weight, table, window, raw_slots, values, first_fresh, cell, eps, C, D,
            RATIO, SPAN, ROPE, FRESH, BLOCK, STEP,
        )  # fmt: skip
        lane = 2 * tl.arange(0, BLOCK // 2)[:, None] + tl.arange(0, 2)[None, :]
        target = cache + tl.load(write_slots + cell) * D + lane
        tl.store(target, entry.to(cache.dtype.element_ty), mask=lane < D)


@triton.jit
def _compress(
    cache, raw, bias, weight, table, windows, write_slots, raw_slots, eps, C, D, RATIO,
    SPAN: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    _mix(
        cache, raw, bias, weight, table, windows, write_slots, raw_slots, raw, 0,
        tl.program_id(0).to(tl.int64), eps, C, D, RATIO, SPAN, ROPE, False, BLOCK, STEP,
    )  # fmt: skip


@triton.jit
def _store_entries(
    cache, raw, values, positions, slots, bias, weight, table, windows, write_slots, raw_slots,
    eps, W, K, cells, C, D, RATIO,
    SPAN: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    COPY: tl.constexpr,
):  # fmt: skip
    """Programs of windows first, then of pieces of raw rows.

    A window reads what this launch stores from where it comes from: nothing waits for a store.
    """
    cell = tl.program_id(0).to(tl.int64)
    if cell < cells:
        if tl.program_id(1) == 0:
            row = cell // K
            _mix(
                cache, raw, bias, weight, table, windows, write_slots, raw_slots,
                values + row * W * 2 * C, tl.load(positions + row * W), cell,
                eps, C, D, RATIO, SPAN, ROPE, True, BLOCK, STEP,
            )  # fmt: skip
    else:
        copy_raw(raw, values, slots, cell - cells, 2 * C, COPY)


@implement("compress", "cuda")
def compress(
    cache: Tensor,
    raw: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    rope_table: Tensor,
    windows: Tensor,
    write_slots: Tensor,
    raw_slots: Tensor,
) -> None:
    (ratio, channels), (dim,), span = bias.shape, norm_weight.shape, raw_slots.shape[2]
    if raw.dtype != torch.float32 or dim % 2:
        args = (cache, raw, bias, norm_weight, eps, rope_table, windows, write_slots, raw_slots)
        SPECIFICATIONS["compress"](*args)
    elif windows.numel():
        block = triton.next_power_of_2(dim)
        _compress[(windows.numel(),)](
            cache, raw, bias, norm_weight, rope_table, windows.contiguous(),
            write_slots.contiguous(), raw_slots.contiguous(), eps, channels, dim, ratio,
            SPAN=span, ROPE=rope_table.shape[1], BLOCK=block,
            STEP=min(STEP, triton.next_power_of_2(span)), num_warps=warps_of(block),
        )  # fmt: skip


def warps_of(channels: int) -> int:
    """So that a channel's rows lie in one thread: four channels each."""
    return min(8, max(1, channels // 128))


@implement("store_entries", "cuda")
def store_entries(
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
    (ratio, channels), (dim,), span = bias.shape, norm_weight.shape, raw_slots.shape[2]
    mixed = (bias, norm_weight, eps, rope_table, windows, write_slots, raw_slots)
    if raw.dtype != torch.float32 or values.dtype != raw.dtype or dim % 2:
        SPECIFICATIONS["store_entries"](cache, raw, values, positions, slots, *mixed)
    elif slots.numel():
        block, (_, width), cells = triton.next_power_of_2(dim), slots.shape, windows.numel()
        piece = min(ELEMENTS, triton.next_power_of_2(2 * channels))
        _store_entries[(cells + slots.numel(), triton.cdiv(2 * channels, piece))](
            cache, raw, values.contiguous(), positions.contiguous(), slots.contiguous(), bias,
            norm_weight, rope_table, windows.contiguous(), write_slots.contiguous(),
            raw_slots.contiguous(), eps, width, windows.shape[1], cells, channels, dim, ratio,
            SPAN=span, ROPE=rope_table.shape[1], BLOCK=block,
            STEP=min(STEP, triton.next_power_of_2(span)), COPY=piece, num_warps=warps_of(block),
        )  # fmt: skip
