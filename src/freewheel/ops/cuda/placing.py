# SPDX-License-Identifier: Apache-2.0
"""Parts of a layer's first products added up, and each sum taken to where it belongs.

Windows that close come first, a program each; then the tokens, whose programs are by what they do:
the query latent, the key, the gates, and pieces of raw rows. A window reads what this launch stores
from where it comes from: nothing waits for a store.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.entries import mix_parts
from freewheel.ops.cuda.keys import turn_one, turn_tail
from freewheel.ops.registry import SPECIFICATIONS, implement

COPY, WARPS = 512, 8
"""Elements of a raw row that one program adds up, and the warps of every program."""

STEP, FEW_ROWS = 8, 4
"""Raw rows mixed at a time: all of a short window, few of a long one, which registers hold."""


@triton.jit
def _sum_parts(products, at, mask, apart, PARTS: tl.constexpr):
    """float32: the parts of the products at `at`, added in their order."""
    total = tl.load(products + at, mask=mask, other=0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(products + part * apart + at, mask=mask, other=0)
    return total


@triton.jit
def _norm_latent(
    line, weight, out, eps, apart, L, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    inside = lane < L
    gain = tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    value = _sum_parts(line, lane, inside, apart, PARTS)
    value = value * (1 / tl.sqrt(tl.sum(value * value, 0) / L + eps)) * gain
    tl.store(out + lane, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_key(
    line, weight, angles, target, eps, apart, D,
    SPAN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, BLOCK // 2)
    lane = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    inside = lane < D
    gain = tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    value = _sum_parts(line, lane, inside, apart, PARTS)
    size = tl.sum(tl.sum(value * value, 1), 0)
    value = value * (1 / tl.sqrt(size / D + eps)) * gain
    first, second = tl.split(value)
    low, high = turn_tail(first, second, angles, pair, D, 1.0, SPAN)
    tl.store(target + lane, tl.join(low, high).to(target.dtype.element_ty), mask=inside)


@triton.jit
def _copy_piece(
    line, target, piece, apart, SIZE, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    lane = piece * BLOCK + tl.arange(0, BLOCK)
    value = _sum_parts(line, lane, lane < SIZE, apart, PARTS)
    tl.store(target + lane, value.to(target.dtype.element_ty), mask=lane < SIZE)


@triton.jit
def _mix(
    cache, raw, bias, weight, table, windows, write_slots, raw_slots, line, pitch, apart, positions,
    cell, W, K, eps, C, D, RATIO,
    SPAN: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Store the entry of one window, if it is one."""
    window = tl.load(windows + cell)
    if window >= 0:
        row = cell // K
        entry = mix_parts(
            raw, bias, weight, table, window, raw_slots, line + row * W * pitch, pitch, apart,
            tl.load(positions + row * W), cell, eps, C, D, RATIO, SPAN, ROPE, True, PARTS,
            BLOCK, STEP,
        )  # fmt: skip
        lane = 2 * tl.arange(0, BLOCK // 2)[:, None] + tl.arange(0, 2)[None, :]
        target = cache + tl.load(write_slots + cell) * D + lane
        tl.store(target, entry.to(cache.dtype.element_ty), mask=lane < D)


@triton.jit
def _mix_index(
    cache, raw, bias, weight, table, windows, write_slots, raw_slots, line, pitch, apart, positions,
    cell, role, W, K, eps, C, D, RATIO,
    SPAN: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """As `_mix`, for the first role of cells from 0 on."""
    if (role == 0) & (cell >= 0):
        _mix(
            cache, raw, bias, weight, table, windows, write_slots, raw_slots, line, pitch, apart,
            positions, cell, W, K, eps, C, D, RATIO, SPAN, ROPE, PARTS, BLOCK, STEP,
        )  # fmt: skip


@triton.jit
def _place_token(
    line, latent, gates, cache, query_weight, key_weight, angles, slot, eps, gate_scale, apart,
    pitch, token, role, L, D, G,
    ROPE: tl.constexpr, PARTS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A token's query latent, key or gates, by `role`."""
    if role == 0:
        _norm_latent(line, query_weight, latent + token * L, eps, apart, L, PARTS, BLOCK_L)
    elif role == 1:
        target = cache + tl.load(slot) * D
        _store_key(line + L, key_weight, angles, target, eps, apart, D, ROPE, PARTS, BLOCK_D)
    else:
        lane = tl.arange(0, BLOCK_G)
        value = _sum_parts(line + pitch - G, lane, lane < G, apart, PARTS) * gate_scale
        tl.store(gates + token * G + lane, value, mask=lane < G)


@triton.jit
def _place_raw(
    line, raw, index_raw, slot, piece, apart, C, CI,
    KINDS: tl.constexpr, PARTS: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """A piece of a token's raw rows."""
    pieces = tl.cdiv(2 * C, COPY)
    if piece < pieces:
        _copy_piece(line, raw + slot * 2 * C, piece, apart, 2 * C, PARTS, COPY)
    elif KINDS == 2:
        target = index_raw + slot * 2 * CI
        _copy_piece(line + 2 * C, target, piece - pieces, apart, 2 * CI, PARTS, COPY)


@triton.jit
def _place_inputs(
    products, latent, gates, cache, query_weight, key_weight, positions, table, slots,
    entries, raw, bias, entry_weight, index_entries, index_raw, index_bias, index_weight,
    raw_write_slots, windows, write_slots, raw_slots, eps, gate_scale, W, K, cells, apart, pitch,
    L, D, C, DI, CI, G, RATIO,
    KINDS: tl.constexpr, SPAN: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_G: tl.constexpr,
    STEP: tl.constexpr, COPY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    first, role = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if first < KINDS * cells:
        if (role == 0) & (first < cells):
            _mix(
                entries, raw, bias, entry_weight, table, windows, write_slots, raw_slots,
                products + L + D, pitch, apart, positions, first, W, K, eps, C, D, RATIO,
                SPAN, ROPE, PARTS, BLOCK_D, STEP,
            )  # fmt: skip
        if KINDS == 2:
            _mix_index(
                index_entries, index_raw, index_bias, index_weight, table, windows, write_slots,
                raw_slots, products + L + D + 2 * C, pitch, apart, positions, first - cells, role,
                W, K, eps, CI, DI, RATIO, SPAN, ROPE, PARTS, BLOCK_I, STEP,
            )  # fmt: skip
    else:
        token = first - KINDS * cells
        line = products + token * pitch
        if role < 3:
            angles = table + tl.load(positions + token).to(tl.int64) * ROPE
            _place_token(
                line, latent, gates, cache, query_weight, key_weight, angles, slots + token, eps,
                gate_scale, apart, pitch, token, role, L, D, G,
                ROPE, PARTS, BLOCK_L, BLOCK_D, BLOCK_G,
            )  # fmt: skip
        elif KINDS > 0:
            slot = tl.load(raw_write_slots + token)
            _place_raw(
                line + L + D, raw, index_raw, slot, role - 3, apart, C, CI, KINDS, PARTS, COPY
            )


class Kind(NamedTuple):
    """One kind of entries: its caches and what it takes to mix one."""

    entries: Tensor  # float [m_pages, page_rows, D]
    raw: Tensor  # float32 [l_pages, page_size, 2C]
    bias: Tensor  # float32 [ratio, C]
    weight: Tensor  # float [D]


def _kind(
    entries: Tensor | None, raw: Tensor | None, bias: Tensor | None, weight: Tensor | None
) -> Kind | None:
    if entries is None or raw is None or bias is None or weight is None:
        return None
    return Kind(entries, raw, bias, weight)


@implement("place_inputs", "cuda")
def place_inputs(
    products: Tensor,
    dtype: torch.dtype,
    cache: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    slots: Tensor,
    gate_scale: float,
    entries: Tensor | None = None,
    raw: Tensor | None = None,
    bias: Tensor | None = None,
    entry_weight: Tensor | None = None,
    index_entries: Tensor | None = None,
    index_raw: Tensor | None = None,
    index_bias: Tensor | None = None,
    index_weight: Tensor | None = None,
    raw_write_slots: Tensor | None = None,
    windows: Tensor | None = None,
    write_slots: Tensor | None = None,
    raw_slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    own = _kind(entries, raw, bias, entry_weight)
    more = _kind(index_entries, index_raw, index_bias, index_weight)
    planned = (raw_write_slots, windows, write_slots, raw_slots)
    norms = (query_weight, key_weight)
    kinds = [kind for kind in (own, more) if kind is not None]
    even = all(len(kind.weight) % 2 == 0 for kind in kinds) and len(key_weight) % 2 == 0
    if products.dtype != torch.float32 or not even:
        args = (dtype, cache, *norms, eps, positions, rope_table, slots, gate_scale)
        given = (entries, raw, bias, entry_weight)
        given += (index_entries, index_raw, index_bias, index_weight)
        return SPECIFICATIONS["place_inputs"](products, *args, *given, *planned)
    sized = (*slots.shape, products.shape[-1])
    used = len(query_weight) + len(key_weight) + sum(kind.raw.shape[2] for kind in kinds)
    latent = products.new_empty((*slots.shape, len(query_weight)), dtype=dtype)
    gates = products.new_empty((*slots.shape, sized[-1] - used))
    if slots.numel():
        where = (positions.contiguous(), rope_table, slots.contiguous())
        lanes = tuple(slots if t is None else t.contiguous() for t in planned)
        scalars = (eps, gate_scale)
        _launch(
            products.contiguous(), (latent, gates), (cache, *norms, *where), kinds, lanes, scalars
        )
    return latent, gates


def _launch(
    products: Tensor,
    out: tuple[Tensor, Tensor],
    keys: tuple[Tensor, ...],
    kinds: list[Kind],
    lanes: tuple[Tensor, ...],
    scalars: tuple[float, float],
) -> None:
    """`keys`: from `cache` to `slots`; `lanes`: from `raw_write_slots` to `raw_slots`."""
    (parts, batch, width, pitch), (latent, gates) = products.shape, out
    cache, table, tokens = keys[0], keys[4], batch * width
    absent = Kind(cache, cache, cache, cache)
    own, more = (*kinds, absent, absent)[:2]
    closing = lanes[1].shape[1] if kinds else 0
    cells, span = (batch * closing, lanes[3].shape[2]) if kinds else (0, 1)
    channels = [kind.bias.shape[1] for kind in kinds] + [0, 0]
    ratio = len(own.bias) if kinds else 1
    pieces = sum(triton.cdiv(2 * count, COPY) for count in channels)
    index_dim = len(more.weight) if len(kinds) > 1 else 2
    _place_inputs[(len(kinds) * cells + tokens, 3 + pieces)](
        products, latent, gates, *keys, *own, *more, *lanes, *scalars, width, max(1, closing),
        cells, tokens * pitch, pitch, latent.shape[-1], cache.shape[2], channels[0], index_dim,
        channels[1], gates.shape[-1], ratio,
        KINDS=len(kinds), SPAN=span, ROPE=table.shape[1], PARTS=parts,
        BLOCK_L=triton.next_power_of_2(latent.shape[-1]),
        BLOCK_D=triton.next_power_of_2(cache.shape[2]), BLOCK_I=triton.next_power_of_2(index_dim),
        BLOCK_G=triton.next_power_of_2(max(1, gates.shape[-1])),
        STEP=triton.next_power_of_2(span) if span <= STEP else FEW_ROWS, COPY=COPY,
        CHAINED=CHAINED, num_warps=WARPS, launch_pdl=CHAINED,
    )  # fmt: skip


INDEX_HEADS = 8
"""Heads of the indexer that one program turns: they are small."""


@triton.jit
def _turn_heads(
    source, target, first, angles, HI, DI,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Store HEADS heads of DI elements from the first on, the last SPAN of each turned."""
    head, pair = first + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    lane = (head * DI + 2 * pair)[:, :, None] + tl.arange(0, 2)[None, None, :]
    inside = ((head < HI) & (2 * pair < DI))[:, :, None]
    first_half, second_half = tl.split(tl.load(source + lane, mask=inside, other=0).to(tl.float32))
    low, high = turn_tail(first_half, second_half, angles, pair, DI, 1.0, SPAN)
    tl.store(target + lane, tl.join(low, high).to(target.dtype.element_ty), mask=inside)


@triton.jit
def _open_queries(
    joined, out, index_out, positions, table, eps, H, D, HI, DI, pitch,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_I: tl.constexpr, HEADS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = table + tl.load(positions + token).to(tl.int64) * SPAN
    if head < H:
        turn_one(
            joined + token * pitch + head * D, out + (token * H + head) * D, out, angles, eps, 1.0,
            D, SPAN, True, False, BLOCK,
        )  # fmt: skip
    else:
        _turn_heads(
            joined + token * pitch + H * D, index_out + token * HI * DI, (head - H) * HEADS, angles,
            HI, DI, SPAN, BLOCK_I, HEADS,
        )  # fmt: skip


@implement("open_queries", "cuda")
def open_queries(
    joined: Tensor,
    dim: int,
    eps: float,
    index_heads: int,
    index_dim: int,
    positions: Tensor,
    rope_table: Tensor,
) -> tuple[Tensor, Tensor]:
    if joined.dtype == torch.float64 or dim % 2 or index_dim % 2:
        args = (dim, eps, index_heads, index_dim, positions, rope_table)
        return SPECIFICATIONS["open_queries"](joined, *args)
    joined, lead = joined.contiguous(), joined.shape[:-1]
    heads = (joined.shape[-1] - index_heads * index_dim) // dim
    out = joined.new_empty((*lead, heads, dim))
    index_out = joined.new_empty((*lead, index_heads, index_dim))
    if joined.numel():
        _open_queries[(positions.numel(), heads + triton.cdiv(index_heads, INDEX_HEADS))](
            joined, out, index_out, positions.contiguous(), rope_table, eps, heads, dim,
            index_heads, index_dim, joined.shape[-1],
            SPAN=rope_table.shape[1], BLOCK=triton.next_power_of_2(max(2, dim // 2)),
            BLOCK_I=triton.next_power_of_2(max(2, index_dim // 2)), HEADS=INDEX_HEADS,
            CHAINED=CHAINED, num_warps=1, launch_pdl=CHAINED,
        )  # fmt: skip
    return out, index_out
