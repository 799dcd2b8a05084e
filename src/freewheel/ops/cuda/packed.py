# SPDX-License-Identifier: Apache-2.0
"""Stores of packed latents and index keys, fused with what else a token needs at that place.

As `ops.cuda.latents`, with the row quantised in registers: one launch, the same programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.cache import turn
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.latents import norm_row, rows_of
from freewheel.ops.cuda.packing import codes_of, largest_of, tile_scale, views
from freewheel.ops.registry import SPECIFICATIONS, implement

TILE = 128
"""Values of a latent that one scale covers."""


@triton.jit
def _latent_row(
    source, codes, plain, scales, slot, weight, position, table, eps,
    RANK: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, HALF: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Norm, rotate, quantise and store one token's latent."""
    count: tl.constexpr = RANK // TILE
    tile = tl.arange(0, TILES)
    lane = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = lane < RANK
    value = tl.load(source + lane, mask=inside, other=0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(tl.sum(value * value, 1), 0) / RANK + eps)
    value = value * scale * tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    factor = tile_scale(largest_of(value, 1))
    code = codes_of(tl.div_rn(value, tl.broadcast_to(factor[:, None], (TILES, TILE))))
    tl.store(codes + slot * BYTES + lane, code, mask=inside)
    tl.store(scales + slot * (BYTES // 4) + RANK // 4 + tile, factor, mask=tile < count)

    pair = tl.arange(0, HALF)
    live = pair < SPAN // 2
    first_at = RANK + (2 * pair if INTERLEAVED else pair)
    second_at = first_at + (1 if INTERLEAVED else SPAN // 2)
    first = tl.load(source + first_at, mask=live, other=0).to(tl.float32)
    second = tl.load(source + second_at, mask=live, other=0).to(tl.float32)
    low, high = turn(first, second, table, position, pair, live, SPAN)
    target = plain + slot * (BYTES // 2) + (RANK + 4 * count) // 2 + pair
    tl.store(target, low.to(tl.bfloat16), mask=live)
    tl.store(target + SPAN // 2, high.to(tl.bfloat16), mask=live)


@triton.jit
def _norm_latents(
    codes, plain, scales, query, query_weight, out, compressed, latent_weight, positions, table,
    slots, eps, query_stride, latent_stride,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK_Q: tl.constexpr, HALF: tl.constexpr,
    BYTES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _latent_row(
            compressed + token * latent_stride, codes, plain, scales, tl.load(slots + token),
            latent_weight, tl.load(positions + token), table, eps,
            RANK, SPAN, INTERLEAVED, TILE, TILES, HALF, BYTES,
        )  # fmt: skip
    else:
        norm_row(
            query + token * query_stride, 0, query_weight, out + token * WIDTH, eps,
            WIDTH, BLOCK_Q, 1,
        )  # fmt: skip


@implement("fp8_norm_latents", "cuda")
def fp8_norm_latents(
    cache: Tensor,
    query: Tensor,
    query_weight: Tensor,
    compressed: Tensor,
    latent_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
) -> Tensor:
    if query.dtype == torch.float64:
        return SPECIFICATIONS["fp8_norm_latents"](
            cache, query, query_weight, compressed, latent_weight, eps, positions, rope_table,
            interleaved, slots,
        )  # fmt: skip
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if slots.numel():
        (query, stride), (compressed, own_stride) = rows_of(query), rows_of(compressed)
        rank, span, width = latent_weight.shape[0], rope_table.shape[1], query.shape[-1]
        _norm_latents[(slots.numel(), 2)](
            *views(cache), query, query_weight, out, compressed, latent_weight,
            positions.contiguous(), rope_table, slots.contiguous(), eps, stride, own_stride,
            WIDTH=width, RANK=rank, SPAN=span, INTERLEAVED=interleaved, TILE=TILE,
            TILES=triton.next_power_of_2(rank // TILE), BLOCK_Q=triton.next_power_of_2(width),
            HALF=triton.next_power_of_2(span // 2), BYTES=cache.shape[2], CHAINED=CHAINED,
            num_warps=4, launch_pdl=CHAINED,
        )  # fmt: skip
    return out


@triton.jit
def _index_key_row(
    source, codes, scales, slot, page_rows, weight, bias, position, table, eps,
    DIM: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norm, rotate, quantise and store one token's index key. DIM is a power of two."""
    lane, pair = tl.arange(0, DIM), tl.arange(0, HALF)
    value = tl.load(source + lane).to(tl.float32)
    mean = tl.sum(value, 0) / DIM
    apart = value - mean
    scale = 1 / tl.sqrt(tl.sum(apart * apart, 0) / DIM + eps)
    kept = lane >= SPAN
    gain = tl.load(weight + lane).to(tl.float32)
    rest = apart * scale * gain + tl.load(bias + lane).to(tl.float32)

    live = pair < SPAN // 2
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = first_at + (1 if INTERLEAVED else SPAN // 2)
    first = (tl.load(source + first_at, mask=live, other=0).to(tl.float32) - mean) * scale
    second = (tl.load(source + second_at, mask=live, other=0).to(tl.float32) - mean) * scale
    first = first * tl.load(weight + first_at, mask=live, other=0).to(tl.float32)
    second = second * tl.load(weight + second_at, mask=live, other=0).to(tl.float32)
    first += tl.load(bias + first_at, mask=live, other=0).to(tl.float32)
    second += tl.load(bias + second_at, mask=live, other=0).to(tl.float32)
    low, high = turn(first, second, table, position, pair, live, SPAN)

    most = largest_of(tl.where(kept, rest, 0.0), 0)
    low, high = tl.where(live, low, 0.0), tl.where(live, high, 0.0)
    turned = largest_of(tl.join(low, high), 1)
    turned = largest_of(turned, 0)
    most = tl.where(turned != turned, turned, tl.where(turned > most, turned, most))
    factor = tile_scale(most)
    page = slot // page_rows
    target = codes + page * page_rows * (DIM + 4) + slot % page_rows * DIM
    tl.store(target + lane, codes_of(tl.div_rn(rest, factor + tl.zeros_like(rest))), mask=kept)
    tl.store(target + pair, codes_of(tl.div_rn(low, factor + tl.zeros_like(low))), mask=live)
    far = target + SPAN // 2 + pair
    tl.store(far, codes_of(tl.div_rn(high, factor + tl.zeros_like(high))), mask=live)
    tail = page * page_rows * ((DIM + 4) // 4) + page_rows * (DIM // 4)
    tl.store(scales + tail + slot % page_rows, factor)


@triton.jit
def pack_token(
    codes, scales, query, query_out, gates, gates_out, key, weight, bias, positions, table, slots,
    eps, gate_scale, H, query_stride, gate_stride, key_stride, page_rows, token, part,
    DIM: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """As `latents.place_token`, with the key packed."""
    token = token.to(tl.int64)
    position = tl.load(positions + token)
    if part == 0:
        _index_key_row(
            key + token * key_stride, codes, scales, tl.load(slots + token), page_rows, weight,
            bias, position, table, eps, DIM, SPAN, INTERLEAVED, HALF,
        )  # fmt: skip
    else:
        lane, pair = tl.arange(0, DIM), tl.arange(0, HALF)
        h = (part - 1) * HEADS + tl.arange(0, HEADS)
        real = h < H
        gate = tl.load(gates + token * gate_stride + h, mask=real, other=0)
        tl.store(gates_out + token * H + h, gate * gate_scale, mask=real)
        source = query + token * query_stride + h[:, None] * DIM
        target = query_out + (token * H + h[:, None]) * DIM
        rest = real[:, None] & (lane >= SPAN)[None, :]
        tl.store(target + lane[None, :], tl.load(source + lane[None, :], mask=rest), mask=rest)
        within = (pair < SPAN // 2)[None, :]
        live = within & real[:, None]
        first_at = 2 * pair if INTERLEAVED else pair
        second_at = first_at + (1 if INTERLEAVED else SPAN // 2)
        first = tl.load(source + first_at[None, :], mask=live, other=0).to(tl.float32)
        second = tl.load(source + second_at[None, :], mask=live, other=0).to(tl.float32)
        low, high = turn(first, second, table, position, pair[None, :], within, SPAN)
        kind = query_out.dtype.element_ty
        tl.store(target + pair[None, :], low.to(kind), mask=live)
        tl.store(target + SPAN // 2 + pair[None, :], high.to(kind), mask=live)


@triton.jit
def _index_queries(
    codes, scales, query, query_out, gates, gates_out, key, weight, bias, positions, table, slots,
    eps, gate_scale, H, query_stride, gate_stride, key_stride, page_rows,
    DIM: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    pack_token(
        codes, scales, query, query_out, gates, gates_out, key, weight, bias, positions, table,
        slots, eps, gate_scale, H, query_stride, gate_stride, key_stride, page_rows,
        tl.program_id(0), tl.program_id(1), DIM, SPAN, INTERLEAVED, HEADS, HALF,
    )  # fmt: skip


@implement("fp8_index_queries", "cuda")
def fp8_index_queries(
    cache: Tensor,
    query: Tensor,
    gates: Tensor,
    gate_scale: float,
    key: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    if query.dtype == torch.float64:
        return SPECIFICATIONS["fp8_index_queries"](
            cache, query, gates, gate_scale, key, norm_weight, norm_bias, eps, positions,
            rope_table, interleaved, slots,
        )  # fmt: skip
    turned = torch.empty_like(query, memory_format=torch.contiguous_format)
    scaled = torch.empty_like(gates, memory_format=torch.contiguous_format)
    if slots.numel():
        (heads, dim), span, per_program = query.shape[2:], rope_table.shape[1], 16
        query = query if query.stride(2) == dim else query.contiguous()
        (query, q_stride), (gates, g_stride) = rows_of(query), rows_of(gates)
        key, k_stride = rows_of(key)
        codes, _, scales = views(cache)
        _index_queries[(slots.numel(), 1 + triton.cdiv(heads, per_program))](
            codes, scales, query, turned, gates, scaled, key, norm_weight, norm_bias,
            positions.contiguous(), rope_table, slots.contiguous(), eps, gate_scale, heads,
            q_stride, g_stride, k_stride, cache.shape[1],
            DIM=dim, SPAN=span, INTERLEAVED=interleaved, HEADS=per_program,
            HALF=triton.next_power_of_2(span // 2), CHAINED=CHAINED, num_warps=4,
            launch_pdl=CHAINED,
        )  # fmt: skip
    return turned, scaled
