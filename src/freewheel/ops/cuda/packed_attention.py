# SPDX-License-Identifier: Apache-2.0
"""Index logits over packed keys: codes become bfloat16 in registers, exactly.

A key's scale stays outside of the products: it is positive, so it multiplies the sum over heads.
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

KEYS, QUERIES = 64, 4
"""Keys and queries of one program of index logits."""


def in_registers(x: Tensor) -> bool:
    """Whether codes are widened by instructions of the GPU, for a product in bfloat16."""
    return x.is_cuda and x.dtype == torch.bfloat16


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
