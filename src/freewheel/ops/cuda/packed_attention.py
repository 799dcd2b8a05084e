# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA and index logits over packed rows: codes become bfloat16 in registers, exactly.

Scales stay outside of the products. A latent has four tiles of 128, so its score is four products,
each times its scale, and its share of a tile's values is the weight times that scale. An index key
has one scale, which is positive, so it multiplies the sum over heads. Split and joined as
`ops.cuda.attention` does, in an order that depends on the number of lanes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.group_logits import is_served, logits_by_groups
from freewheel.ops.cuda.packing import codes_of, largest_of, tile_scale, views
from freewheel.ops.cuda.streaming import widen_fp8
from freewheel.ops.registry import SPECIFICATIONS, implement

PART = 128
"""Lanes of one part."""

STEP, WARPS, STAGES = 64, 4, 2

HEADS = 16
"""Heads of one program: the height of a matrix tile."""

SCRATCH = 1 << 24
"""Floats of unjoined parts held at once; wider rectangles go through in pieces of whole queries."""

RANK = 512
"""Values of a latent that these kernels are written for: four tiles."""

KEYS, QUERIES = 64, 4
"""Keys and queries of one program of index logits."""


@triton.jit
def _tiles(start, live):
    """The four tiles of rows that begin at `start`."""
    first, second = tl.load(start, mask=live, other=0), tl.load(start + 128, mask=live, other=0)
    third, last = tl.load(start + 256, mask=live, other=0), tl.load(start + 384, mask=live, other=0)
    return first, second, third, last


@triton.jit
def _factors(start, live):
    """float32 [1, STEP]: the scale of each tile of rows whose scales begin at `start`."""
    first, second = tl.load(start, mask=live, other=0), tl.load(start + 1, mask=live, other=0)
    third, last = tl.load(start + 2, mask=live, other=0), tl.load(start + 3, mask=live, other=0)
    return first[None, :], second[None, :], third[None, :], last[None, :]


@triton.jit
def _keep(start, live, first, second, third, last):
    """Store four tiles of rows that begin at `start`."""
    tl.store(start, first, mask=live)
    tl.store(start + 128, second, mask=live)
    tl.store(start + 256, third, mask=live)
    tl.store(start + 384, last, mask=live)


@triton.jit
def _mix(weight, factor, key, mixed, decay):
    """One tile's running mixture, with the keys of one more step."""
    share = (weight * factor).to(key.dtype)
    return tl.dot(share, key, mixed * decay[:, None], input_precision="ieee")


@triton.jit
def _attend_part(
    query, codes, plain, scales, slots, part_out, high_out, total_out, scale, K, H,
    ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BYTES: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, HEADS: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
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
        v, r = tl.arange(0, 128), tl.arange(0, BLOCK_R)
        own = query + (n * H + h)[:, None] * (512 + ROPE)
        held = real[:, None]
        q0, q1, q2, q3 = _tiles(own + v[None, :], held)
        q_rope = tl.load(own + 512 + r[None, :], mask=held & (r < ROPE)[None, :], other=0)
        high = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        mixed0 = tl.zeros((HEADS, 128), tl.float32)
        mixed1 = tl.zeros((HEADS, 128), tl.float32)
        mixed2 = tl.zeros((HEADS, 128), tl.float32)
        mixed3 = tl.zeros((HEADS, 128), tl.float32)
        for at in range(0, PART, STEP):
            lane = part * PART + at + tl.arange(0, STEP)
            slot = tl.load(slots + n * K + lane, mask=lane < K, other=-1)
            seen = slot >= 0
            row, there = slot.to(tl.int64), seen[:, None]
            line = codes + row[:, None] * BYTES + v[None, :]
            key0, key1, key2, key3 = _tiles(line, there)
            key0, key1 = widen_fp8(key0, ASM), widen_fp8(key1, ASM)
            key2, key3 = widen_fp8(key2, ASM), widen_fp8(key3, ASM)
            f0, f1, f2, f3 = _factors(scales + row * (BYTES // 4) + 128, seen)
            tail = plain + row[:, None] * (BYTES // 2) + 264 + r[None, :]
            turned = tl.load(tail, mask=there & (r < ROPE)[None, :], other=0).to(q_rope.dtype)
            score = tl.dot(q_rope, tl.trans(turned), input_precision="ieee")  # [HEADS, STEP]
            score += tl.dot(q0, tl.trans(key0), input_precision="ieee") * f0
            score += tl.dot(q1, tl.trans(key1), input_precision="ieee") * f1
            score += tl.dot(q2, tl.trans(key2), input_precision="ieee") * f2
            score += tl.dot(q3, tl.trans(key3), input_precision="ieee") * f3
            score = tl.where(seen[None, :], score * scale, float("-inf"))
            highest = tl.maximum(high, tl.max(score, 1))
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            weight = tl.exp(score - shift[:, None])
            decay = tl.exp(high - shift)
            total = total * decay + tl.sum(weight, 1)
            mixed0 = _mix(weight, f0, key0, mixed0, decay)
            mixed1 = _mix(weight, f1, key1, mixed1, decay)
            mixed2 = _mix(weight, f2, key2, mixed2, decay)
            mixed3 = _mix(weight, f3, key3, mixed3, decay)
            high = highest
        tl.store(high_out + cell, high, mask=real)
        tl.store(total_out + cell, total, mask=real)
        target = part_out + cell[:, None] * 512 + v[None, :]
        _keep(target, held, mixed0, mixed1, mixed2, mixed3)


@triton.jit
def _join_parts(
    part_in, high_in, total_in, out, parts, H,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
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
        width = tl.where(tl.load(total_in + cell) == 0, 0, 512)  # 0: it was never written
        value = tl.load(part_in + cell * 512 + v, mask=v < width, other=0)
        mixed += value * tl.exp(tl.load(high_in + cell) - shift)
    result = tl.where(total == 0, 0.0, mixed / tl.where(total == 0, 1.0, total))
    tl.store(out + (n * H + h) * 512 + v, result.to(out.dtype.element_ty))


def in_registers(x: Tensor) -> bool:
    """Whether codes are widened by instructions of the GPU, for a product in bfloat16."""
    return x.is_cuda and x.dtype == torch.bfloat16


@implement("fp8_sparse_mla", "cuda")
def fp8_sparse_mla(
    query: Tensor, latent: Tensor, slots: Tensor, scale: float, value_dim: int
) -> Tensor:
    if query.dtype == torch.float64 or value_dim != RANK:
        return SPECIFICATIONS["fp8_sparse_mla"](query, latent, slots, scale, value_dim)
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
    """query [N, H, D], slots [N, K] -> out [N, H, 512]"""
    (count, heads, dim), rope = query.shape, query.shape[2] - RANK
    mixed = torch.empty((count, parts, heads, RANK), dtype=torch.float32, device=out.device)
    high, total = torch.empty((2, count, parts, heads), dtype=torch.float32, device=out.device)
    _attend_part[(count, parts, triton.cdiv(heads, HEADS))](
        query, *views(latent), slots, mixed, high, total, scale, slots.shape[1], heads,
        ROPE=rope, BLOCK_R=max(16, triton.next_power_of_2(dim - RANK)), BYTES=latent.shape[2],
        PART=PART, STEP=STEP if query.dtype == torch.bfloat16 else 16, HEADS=HEADS,
        ASM=in_registers(query), CHAINED=CHAINED, num_warps=WARPS, num_stages=STAGES,
        launch_pdl=CHAINED,
    )  # fmt: skip
    _join_parts[(count, heads, RANK // 128)](
        mixed, high, total, out, parts, heads, PARTS=triton.next_power_of_2(parts), BLOCK=128,
        CHAINED=CHAINED, num_warps=1, launch_pdl=CHAINED,
    )  # fmt: skip


@triton.jit
def _index_logits(
    query, gates, codes, scales, table, rows, kv_lens, out,
    W, P, PAGE, S, qb, qw, qh, gb, gw,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, KEYS: tl.constexpr,
    QUERIES: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    first = part * QUERIES
    lanes = first + tl.arange(0, QUERIES)
    longest = tl.max(tl.load(kv_lens + b * W + lanes, mask=lanes < W, other=0), 0)
    last = tl.minimum(first + QUERIES, W)
    line = out + (b * W + first) * S
    if tl.program_id(2) * KEYS >= longest:
        for _ in range(first, last):
            tl.store(line + t, float("-inf"), mask=t < S)
            line += S
    else:
        row = tl.load(rows + b).to(tl.int64)
        seen = t < longest
        page = tl.load(table + row * P + t // PAGE, mask=seen, other=0).to(tl.int64)
        d, h = tl.arange(0, DIM), tl.arange(0, BLOCK_H)
        start = page * PAGE * (DIM + 4) + t % PAGE * DIM
        key = tl.load(codes + start[None, :] + d[:, None], mask=seen[None, :], other=0)
        key = widen_fp8(key, ASM)  # [D, KEYS]
        tail = page * PAGE * ((DIM + 4) // 4) + PAGE * (DIM // 4) + t % PAGE
        factor = tl.load(scales + tail, mask=seen, other=0)
        for w in range(first, last):
            total = tl.zeros((KEYS,), tl.float32)
            for at in tl.static_range(0, HEADS, BLOCK_H):
                real = at + h < HEADS
                q = query + b * qb + w * qw + (at + h)[:, None] * qh + d[None, :]
                q = tl.load(q, mask=real[:, None], other=0)  # [H, D]
                gate = tl.load(gates + b * gb + w * gw + at + h, mask=real, other=0)
                wide = q.to(tl.float32)
                share = tile_scale(largest_of(wide, 1))  # as a key is rounded
                parts = tl.broadcast_to(share[:, None], (BLOCK_H, DIM))
                q = widen_fp8(codes_of(tl.div_rn(wide, parts)), ASM)
                gate = gate * share
                score = tl.dot(q, key, input_precision="ieee")  # float32 [H, KEYS]
                score = tl.where(score > 0, score, tl.where(score <= 0, 0, score))  # keeps NaN
                total += tl.sum(score * gate[:, None], 0)
            bound = tl.load(kv_lens + b * W + w)
            tl.store(line + t, tl.where(t < bound, total * factor, float("-inf")), mask=t < S)
            line += S


@implement("fp8_index_logits", "cuda")
def fp8_index_logits(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    skip: int = 0,
) -> Tensor:
    args = (query, head_weights, index_keys, page_table, rows, kv_lens)
    room = page_table.shape[1] * index_keys.shape[1]
    if is_served(query, head_weights, index_keys, room, packed=True):
        return logits_by_groups(*args, skip)
    if head_weights.dtype == torch.float64:
        return SPECIFICATIONS["fp8_index_logits"](*args)
    (batch, width, heads, dim), page_size = query.shape, index_keys.shape[1]
    query = query if query.stride(-1) == 1 else query.contiguous()
    gates = head_weights if head_weights.stride(-1) == 1 else head_weights.contiguous()
    length = page_table.shape[1] * page_size
    out = gates.new_empty((batch, width, length))
    if out.numel():
        codes, _, scales = views(index_keys)
        grid = (batch, triton.cdiv(width, QUERIES), triton.cdiv(length, KEYS))
        _index_logits[grid](
            query, gates, codes, scales, page_table, rows, kv_lens.contiguous(), out,
            width, page_table.stride(0), page_size, length,
            *query.stride()[:3], *gates.stride()[:2],
            HEADS=heads, DIM=dim, BLOCK_H=min(64, max(16, triton.next_power_of_2(heads))),
            KEYS=KEYS, QUERIES=QUERIES, ASM=in_registers(query), CHAINED=CHAINED,
            launch_pdl=CHAINED,
        )  # fmt: skip
    return out
