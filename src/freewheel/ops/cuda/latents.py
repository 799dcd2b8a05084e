# SPDX-License-Identifier: Apache-2.0
"""Sparse attention between its projections: one launch an op, over slices as they are.

What a token needs of several kinds is several programs of one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.cache import index_key_row, latent_row, turn
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.parts import load_sum
from freewheel.ops.registry import SPECIFICATIONS, implement

TOKENS, WIDE_TOKENS = 16, 32
"""Tokens of one program of the small products, absorbing and expanding: heights of matrix tiles.

Constants: taller tiles gain up to 1.5 us where there are 128 tokens, but they sum in another order.
"""


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x [B, W, ...] and the elements from one token to the next, over rows and columns alike."""
    if x.stride(-1) != 1 or x.stride(0) != x.shape[1] * x.stride(1):
        x = x.contiguous()
    return x, x.stride(1)


@triton.jit
def norm_row(
    source, pitch, weight, target, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Normalise one row, the sum of PARTS that lie `pitch` apart, and scale it by the weight."""
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    value = load_sum(source + lane, inside, pitch, target.dtype.element_ty, PARTS)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    gain = tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    tl.store(target + lane, (value * scale * gain).to(target.dtype.element_ty), mask=inside)


@triton.jit
def _norm_latents(
    cache, query, query_weight, out, compressed, latent_weight, positions, table, slots, eps,
    query_stride, latent_stride,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        target = cache + tl.load(slots + token) * (RANK + SPAN)
        source, position = compressed + token * latent_stride, tl.load(positions + token)
        latent_row(
            source, 0, target, latent_weight, position, table, eps,
            RANK, SPAN, INTERLEAVED, BLOCK, HALF, 1,
        )  # fmt: skip
    else:
        norm_row(
            query + token * query_stride, 0, query_weight, out + token * WIDTH, eps,
            WIDTH, BLOCK_Q, 1,
        )  # fmt: skip


@implement("norm_latents", "cuda")
def norm_latents(
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
        return SPECIFICATIONS["norm_latents"](
            cache, query, query_weight, compressed, latent_weight, eps, positions, rope_table,
            interleaved, slots,
        )  # fmt: skip
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if slots.numel():
        (query, stride), (compressed, own_stride) = rows_of(query), rows_of(compressed)
        rank, span, width = latent_weight.shape[0], rope_table.shape[1], query.shape[-1]
        _norm_latents[(slots.numel(), 2)](
            cache, query, query_weight, out, compressed, latent_weight, positions.contiguous(),
            rope_table, slots.contiguous(), eps, stride, own_stride,
            WIDTH=width, RANK=rank, SPAN=span, INTERLEAVED=interleaved,
            BLOCK_Q=triton.next_power_of_2(width), BLOCK=triton.next_power_of_2(rank),
            HALF=triton.next_power_of_2(span // 2), CHAINED=CHAINED, num_warps=4,
            launch_pdl=CHAINED,
        )  # fmt: skip
    return out


@triton.jit
def place_token(
    cache, query, query_out, gates, gates_out, key, weight, bias, positions, table, slots, eps,
    gate_scale, H, query_stride, gate_stride, key_stride, token, part,
    DIM: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Of a token, its index key (part 0), or queries and gates of HEADS heads."""
    token = token.to(tl.int64)
    position = tl.load(positions + token)
    lane, pair = tl.arange(0, BLOCK), tl.arange(0, HALF)
    if part == 0:
        index_key_row(
            key + token * key_stride, cache + tl.load(slots + token) * DIM, weight, bias,
            position, table, eps, DIM, SPAN, INTERLEAVED, BLOCK, HALF,
        )  # fmt: skip
    else:
        h = (part - 1) * HEADS + tl.arange(0, HEADS)
        real = h < H
        gate = tl.load(gates + token * gate_stride + h, mask=real, other=0)
        tl.store(gates_out + token * H + h, gate * gate_scale, mask=real)
        source = query + token * query_stride + h[:, None] * DIM
        target = query_out + (token * H + h[:, None]) * DIM
        rest = real[:, None] & ((lane >= SPAN) & (lane < DIM))[None, :]
        tl.store(target + lane[None, :], tl.load(source + lane[None, :], mask=rest), mask=rest)
        live = (pair < SPAN // 2)[None, :] & real[:, None]
        first_at = 2 * pair if INTERLEAVED else pair
        second_at = first_at + (1 if INTERLEAVED else SPAN // 2)
        first = tl.load(source + first_at[None, :], mask=live, other=0).to(tl.float32)
        second = tl.load(source + second_at[None, :], mask=live, other=0).to(tl.float32)
        low, high = turn(
            first, second, table, position, pair[None, :], (pair < SPAN // 2)[None, :], SPAN
        )
        kind = query_out.dtype.element_ty
        tl.store(target + pair[None, :], low.to(kind), mask=live)
        tl.store(target + SPAN // 2 + pair[None, :], high.to(kind), mask=live)


@triton.jit
def _index_queries(
    cache, query, query_out, gates, gates_out, key, weight, bias, positions, table, slots, eps,
    gate_scale, H, query_stride, gate_stride, key_stride,
    DIM: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    place_token(
        cache, query, query_out, gates, gates_out, key, weight, bias, positions, table, slots, eps,
        gate_scale, H, query_stride, gate_stride, key_stride, tl.program_id(0), tl.program_id(1),
        DIM, SPAN, INTERLEAVED, HEADS, BLOCK, HALF,
    )  # fmt: skip


@implement("index_queries", "cuda")
def index_queries(
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
        return SPECIFICATIONS["index_queries"](
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
        _index_queries[(slots.numel(), 1 + triton.cdiv(heads, per_program))](
            cache, query, turned, gates, scaled, key, norm_weight, norm_bias,
            positions.contiguous(), rope_table, slots.contiguous(), eps, gate_scale, heads,
            q_stride, g_stride, k_stride,
            DIM=dim, SPAN=span, INTERLEAVED=interleaved, HEADS=per_program,
            BLOCK=triton.next_power_of_2(dim), HALF=triton.next_power_of_2(span // 2),
            CHAINED=CHAINED, num_warps=4, launch_pdl=CHAINED,
        )  # fmt: skip
    return turned, scaled


@triton.jit
def absorb_head(
    query, key_up, positions, table, out, count, stride, h, part, nth,
    H: tl.constexpr, NOPE: tl.constexpr, SPAN: tl.constexpr, RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, HALF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A head's rotated dimensions (part 0), or BLOCK_C others, for the `nth` TOKENS tokens."""
    token = nth * TOKENS + tl.arange(0, TOKENS)
    real = token < count
    source = query + token.to(tl.int64)[:, None] * stride + h * (NOPE + SPAN)
    target = out + (token.to(tl.int64)[:, None] * H + h) * (RANK + SPAN)
    kind = out.dtype.element_ty
    if part == 0:
        follow(CHAINED)
        pair = tl.arange(0, HALF)[None, :]
        live = real[:, None] & (pair < SPAN // 2)
        first_at = NOPE + (2 * pair if INTERLEAVED else pair)
        second_at = first_at + (1 if INTERLEAVED else SPAN // 2)
        first = tl.load(source + first_at, mask=live, other=0).to(tl.float32)
        second = tl.load(source + second_at, mask=live, other=0).to(tl.float32)
        position = tl.load(positions + token, mask=real, other=0)[:, None]
        low, high = turn(first, second, table, position, pair, live, SPAN)
        tl.store(target + RANK + pair, low.to(kind), mask=live)
        tl.store(target + RANK + SPAN // 2 + pair, high.to(kind), mask=live)
    else:
        n, c = tl.arange(0, BLOCK_N), (part - 1) * BLOCK_C + tl.arange(0, BLOCK_C)
        up = key_up + h * NOPE * RANK + n[:, None] * RANK + c[None, :]
        up = tl.load(up, mask=(n < NOPE)[:, None] & (c < RANK)[None, :], other=0)
        follow(CHAINED)
        x = tl.load(source + n[None, :], mask=real[:, None] & (n < NOPE)[None, :], other=0)
        value = tl.dot(x, up, input_precision="ieee")
        tl.store(target + c[None, :], value.to(kind), mask=real[:, None] & (c < RANK)[None, :])


@triton.jit
def _absorb_query(
    query, key_up, positions, table, out, count, stride,
    H: tl.constexpr, NOPE: tl.constexpr, SPAN: tl.constexpr, RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, HALF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    absorb_head(
        query, key_up, positions, table, out, count, stride,
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        H, NOPE, SPAN, RANK, INTERLEAVED, TOKENS, BLOCK_N, BLOCK_C, HALF, CHAINED,
    )  # fmt: skip


@implement("absorb_query", "cuda")
def absorb_query(
    query: Tensor, key_up: Tensor, positions: Tensor, rope_table: Tensor, interleaved: bool
) -> Tensor:
    (batch, width, heads, dim), (_, nope, rank) = query.shape, key_up.shape
    if query.dtype == torch.float64 or query.dtype != key_up.dtype:
        return SPECIFICATIONS["absorb_query"](query, key_up, positions, rope_table, interleaved)
    span = rope_table.shape[1]
    out = query.new_empty((batch, width, heads, rank + span))
    if out.numel():
        query = query if query.stride(2) == dim else query.contiguous()
        query, stride = rows_of(query)
        block = max(16, min(64, triton.next_power_of_2(rank)))
        grid = (heads, 1 + triton.cdiv(rank, block), triton.cdiv(batch * width, TOKENS))
        _absorb_query[grid](
            query, key_up, positions.contiguous(), rope_table, out, batch * width, stride,
            H=heads, NOPE=nope, SPAN=span, RANK=rank, INTERLEAVED=interleaved, TOKENS=TOKENS,
            BLOCK_N=max(16, triton.next_power_of_2(nope)), BLOCK_C=block,
            HALF=triton.next_power_of_2(span // 2), CHAINED=CHAINED, num_warps=4,
            launch_pdl=CHAINED,
        )  # fmt: skip
    return out


@triton.jit
def _expand_values(
    mixed, value_up, out, count,
    H: tl.constexpr, RANK: tl.constexpr, VALUE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    real = token < count
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    source = mixed + (token.to(tl.int64)[:, None] * H + h) * RANK
    c = tl.arange(0, BLOCK_C)
    up = value_up + h * RANK * VALUE + c[:, None] * VALUE + v[None, :]
    up = tl.load(up, mask=(c < RANK)[:, None] & (v < VALUE)[None, :], other=0)
    follow(CHAINED)
    x = tl.load(source + c[None, :], mask=real[:, None] & (c < RANK)[None, :], other=0)
    total = tl.dot(x, up, input_precision="ieee")
    target = out + token.to(tl.int64)[:, None] * (H * VALUE) + h * VALUE + v[None, :]
    kept = real[:, None] & (v < VALUE)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=kept)


@implement("expand_values", "cuda")
def expand_values(mixed: Tensor, value_up: Tensor) -> Tensor:
    if mixed.dtype == torch.float64 or mixed.dtype != value_up.dtype:
        return SPECIFICATIONS["expand_values"](mixed, value_up)
    heads, rank, value = value_up.shape
    count = mixed.shape[0] * mixed.shape[1]
    out = mixed.new_empty((*mixed.shape[:2], heads * value))
    if out.numel():
        tokens = WIDE_TOKENS if mixed.element_size() == 2 else TOKENS
        block = max(16, min(tokens, triton.next_power_of_2(value)))
        _expand_values[(heads, triton.cdiv(value, block), triton.cdiv(count, tokens))](
            mixed.contiguous(), value_up, out, count,
            H=heads, RANK=rank, VALUE=value, TOKENS=tokens, BLOCK_V=block,
            BLOCK_C=max(16, triton.next_power_of_2(rank)), CHAINED=CHAINED, num_warps=4,
            launch_pdl=CHAINED,
        )  # fmt: skip
    return out
