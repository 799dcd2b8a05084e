# SPDX-License-Identifier: Apache-2.0
"""Norm, rotation and store of one token's keys in one launch: a token is a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.parts import load_sum
from freewheel.ops.registry import SPECIFICATIONS, implement


@triton.jit
def turn(first, second, table, position, pair, live, SPAN: tl.constexpr):
    """The two halves of rotated pairs, float32."""
    angles = table + position.to(tl.int64) * SPAN
    cos = tl.load(angles + pair, mask=live, other=0)
    sin = tl.load(angles + SPAN // 2 + pair, mask=live, other=0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def latent_row(
    source, pitch, target, weight, position, table, eps,
    RANK: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store one token's latent, the sum of PARTS that lie `pitch` apart."""
    kind: tl.constexpr = target.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    inside = lane < RANK
    value = load_sum(source + lane, inside, pitch, kind, PARTS)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / RANK + eps)
    gain = tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    tl.store(target + lane, (value * scale * gain).to(kind), mask=inside)

    pair = tl.arange(0, HALF)
    live = pair < SPAN // 2
    first_at = RANK + (2 * pair if INTERLEAVED else pair)
    second_at = first_at + (1 if INTERLEAVED else SPAN // 2)
    first = load_sum(source + first_at, live, pitch, kind, PARTS)
    second = load_sum(source + second_at, live, pitch, kind, PARTS)
    low, high = turn(first, second, table, position, pair, live, SPAN)
    tl.store(target + RANK + pair, low.to(kind), mask=live)
    tl.store(target + RANK + SPAN // 2 + pair, high.to(kind), mask=live)


@triton.jit
def _store_latent(
    cache, compressed, weight, positions, table, slots, eps,
    RANK: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    source = compressed + token * (RANK + SPAN)
    target = cache + tl.load(slots + token) * (RANK + SPAN)
    position = tl.load(positions + token)
    latent_row(
        source, 0, target, weight, position, table, eps, RANK, SPAN, INTERLEAVED, BLOCK, HALF, 1
    )


@implement("store_latent", "cuda")
def store_latent(
    cache: Tensor,
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
) -> None:
    args = (cache, compressed, norm_weight, eps, positions, rope_table, interleaved, slots)
    if compressed.dtype == torch.float64:
        SPECIFICATIONS["store_latent"](*args)
    elif slots.numel():
        rank, span = norm_weight.shape[0], rope_table.shape[1]
        _store_latent[(slots.numel(),)](
            cache, compressed.contiguous(), norm_weight, positions.contiguous(), rope_table,
            slots.contiguous(), eps, RANK=rank, SPAN=span, INTERLEAVED=interleaved,
            BLOCK=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(span // 2), num_warps=2,
        )  # fmt: skip


@triton.jit
def index_key_row(
    source, target, weight, bias, position, table, eps,
    DIM: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store one token's index key."""
    kind = target.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    inside = lane < DIM
    value = tl.load(source + lane, mask=inside, other=0).to(tl.float32)
    mean = tl.sum(value, 0) / DIM
    apart = tl.where(inside, value - mean, 0)
    scale = 1 / tl.sqrt(tl.sum(apart * apart, 0) / DIM + eps)
    gain = tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    offset = tl.load(bias + lane, mask=inside, other=0).to(tl.float32)
    rest = inside & (lane >= SPAN)
    tl.store(target + lane, (apart * scale * gain + offset).to(kind), mask=rest)

    pair = tl.arange(0, HALF)
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
    tl.store(target + pair, low.to(kind), mask=live)
    tl.store(target + SPAN // 2 + pair, high.to(kind), mask=live)


@triton.jit
def _store_index_key(
    cache, key, weight, bias, positions, table, slots, eps,
    DIM: tl.constexpr, SPAN: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    source, target = key + token * DIM, cache + tl.load(slots + token) * DIM
    position = tl.load(positions + token)
    index_key_row(
        source, target, weight, bias, position, table, eps, DIM, SPAN, INTERLEAVED, BLOCK, HALF
    )


@implement("store_index_key", "cuda")
def store_index_key(
    cache: Tensor,
    key: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
) -> None:
    args = (cache, key, norm_weight, norm_bias, eps, positions, rope_table, interleaved, slots)
    if key.dtype == torch.float64:
        SPECIFICATIONS["store_index_key"](*args)
    elif slots.numel():
        dim, span = key.shape[-1], rope_table.shape[1]
        _store_index_key[(slots.numel(),)](
            cache, key.contiguous(), norm_weight, norm_bias, positions.contiguous(), rope_table,
            slots.contiguous(), eps, DIM=dim, SPAN=span, INTERLEAVED=interleaved,
            BLOCK=triton.next_power_of_2(dim), HALF=triton.next_power_of_2(span // 2), num_warps=1,
        )  # fmt: skip
