# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA, split over keys: one program attends to a few lanes, another joins the parts.

A part is always `PART` lanes, and parts are joined in ascending order, so the order of a sum
depends on the number of lanes alone: not on the batch, the width or the pieces that a wide
rectangle is cut into. A part without a live lane reads nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.registry import SPECIFICATIONS, implement

PART = 128
"""Lanes of one part."""

STEP, WARPS, STAGES = 32, 4, 2

HEADS = 16
"""Heads of one program: the height of a matrix tile."""

SCRATCH = 1 << 24
"""Floats of unjoined parts held at once; wider rectangles go through in pieces of whole queries."""


@triton.jit
def _attend_part(
    query, latent, slots, part_out, high_out, total_out, scale, K, H,
    VALUE: tl.constexpr, ROPE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    PART: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    n, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    h = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    real = h < H
    cell = (n * parts + part) * H + h
    lanes = part * PART + tl.arange(0, PART)
    live = tl.load(slots + n * K + lanes, mask=lanes < K, other=-1) >= 0
    if tl.sum(live.to(tl.int32), 0) == 0:
        tl.store(high_out + cell, float("-inf"), mask=real)
        tl.store(total_out + cell, 0.0, mask=real)
    else:
        v, r = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
        own = query + (n * H + h)[:, None] * (VALUE + ROPE)
        q_value = tl.load(own + v[None, :], mask=real[:, None] & (v < VALUE)[None, :], other=0)
        q_rope = tl.load(
            own + VALUE + r[None, :], mask=real[:, None] & (r < ROPE)[None, :], other=0
        )
        high = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        mixed = tl.zeros((HEADS, BLOCK_V), tl.float32)
        for at in range(0, PART, STEP):
            lane = part * PART + at + tl.arange(0, STEP)
            slot = tl.load(slots + n * K + lane, mask=lane < K, other=-1)
            seen = slot >= 0
            line = latent + slot.to(tl.int64)[:, None] * (VALUE + ROPE)
            key = tl.load(line + v[None, :], mask=seen[:, None] & (v < VALUE)[None, :], other=0)
            turned = tl.load(
                line + VALUE + r[None, :], mask=seen[:, None] & (r < ROPE)[None, :], other=0
            )
            score = tl.dot(q_value, tl.trans(key), input_precision="ieee")  # [HEADS, STEP]
            score += tl.dot(q_rope, tl.trans(turned), input_precision="ieee")
            score = tl.where(seen[None, :], score * scale, float("-inf"))
            highest = tl.maximum(high, tl.max(score, 1))
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            weight = tl.exp(score - shift[:, None])
            decay = tl.exp(high - shift)
            total = total * decay + tl.sum(weight, 1)
            mixed = mixed * decay[:, None]
            mixed += tl.dot(weight.to(key.dtype), key, input_precision="ieee")
            high = highest
        tl.store(high_out + cell, high, mask=real)
        tl.store(total_out + cell, total, mask=real)
        target = part_out + cell[:, None] * VALUE + v[None, :]
        tl.store(target, mixed, mask=real[:, None] & (v < VALUE)[None, :])


@triton.jit
def _join_parts(
    part_in, high_in, total_in, out, parts, H,
    VALUE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first = n * parts * H + h
    every = tl.arange(0, PARTS)
    highs = tl.load(high_in + first + every * H, mask=every < parts, other=float("-inf"))
    totals = tl.load(total_in + first + every * H, mask=every < parts, other=0)
    highest = tl.max(highs, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(totals * tl.exp(highs - shift), 0)
    mixed = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        cell = first + part * H
        width = tl.where(tl.load(total_in + cell) > 0, VALUE, 0)  # else it was never written
        value = tl.load(part_in + cell * VALUE + v, mask=v < width, other=0)
        mixed += value * tl.exp(tl.load(high_in + cell) - shift)
    result = tl.where(total > 0, mixed / tl.where(total > 0, total, 1.0), 0.0)
    result = tl.where(total != total, float("nan"), result)
    tl.store(out + (n * H + h) * VALUE + v, result.to(out.dtype.element_ty), mask=v < VALUE)


@implement("sparse_mla", "cuda")
def sparse_mla(
    query: Tensor, latent: Tensor, slots: Tensor, scale: float, value_dim: int
) -> Tensor:
    rope = latent.shape[2] - value_dim
    if query.dtype == torch.float64 or query.dtype != latent.dtype or rope == 0:
        return SPECIFICATIONS["sparse_mla"](query, latent, slots, scale, value_dim)
    queries, lanes = query.flatten(0, 1).contiguous(), slots.flatten(0, 1).contiguous()
    count, heads = queries.shape[:2]
    out = query.new_empty((*query.shape[:3], value_dim))
    parts = triton.cdiv(lanes.shape[1], PART)
    step = max(1, SCRATCH // max(1, parts * heads * value_dim))
    flat = out.flatten(0, 1)
    for at in range(0, count, step):
        piece = slice(at, at + step)
        _attend(queries[piece], latent, lanes[piece], flat[piece], scale, parts)
    return out


def _attend(
    query: Tensor, latent: Tensor, slots: Tensor, out: Tensor, scale: float, parts: int
) -> None:
    """query [N, H, D], slots [N, K] -> out [N, H, value_dim]"""
    (count, heads, dim), value = query.shape, out.shape[2]
    mixed = torch.empty((count, parts, heads, value), dtype=torch.float32, device=out.device)
    high, total = torch.empty((2, count, parts, heads), dtype=torch.float32, device=out.device)
    block = max(16, triton.next_power_of_2(value))
    _attend_part[(count, parts, triton.cdiv(heads, HEADS))](
        query, latent, slots, mixed, high, total, scale, slots.shape[1], heads,
        VALUE=value, ROPE=dim - value, BLOCK_V=block,
        BLOCK_R=max(16, triton.next_power_of_2(dim - value)),
        PART=PART, STEP=STEP if query.dtype == torch.bfloat16 else 16, HEADS=HEADS,
        CHAINED=CHAINED, num_warps=WARPS, num_stages=STAGES, launch_pdl=CHAINED,
    )  # fmt: skip
    piece = min(128, block)
    _join_parts[(count, heads, triton.cdiv(value, piece))](
        mixed, high, total, out, parts, heads,
        VALUE=value, PARTS=triton.next_power_of_2(parts), BLOCK=piece, CHAINED=CHAINED,
        num_warps=1, launch_pdl=CHAINED,
    )  # fmt: skip
