# SPDX-License-Identifier: Apache-2.0
"""Index logits: a program scores one block of one row's keys for a few queries.

Keys are read through the row's page table; blocks behind the longest length read nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.registry import SPECIFICATIONS, implement

KEYS, QUERIES = 64, 2
"""Keys and queries of one program."""


@triton.jit
def _index_logits(
    query, gates, keys, table, rows, kv_lens, out,
    W, P, PAGE, S, qb, qw, qh, gb, gw,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, CHAINED: tl.constexpr,
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
        slot = page * PAGE + t % PAGE
        d = tl.arange(0, BLOCK_D)
        tile = keys + slot[None, :] * DIM + d[:, None]
        key = tl.load(tile, mask=seen[None, :] & (d < DIM)[:, None], other=0)  # [D, KEYS]
        h = tl.arange(0, BLOCK_H)
        for w in range(first, last):
            total = tl.zeros((KEYS,), tl.float32)
            for at in tl.static_range(0, HEADS, BLOCK_H):
                real = at + h < HEADS
                q = query + b * qb + w * qw + (at + h)[:, None] * qh + d[None, :]
                q = tl.load(q, mask=real[:, None] & (d < DIM)[None, :], other=0)  # [H, D]
                gate = tl.load(gates + b * gb + w * gw + at + h, mask=real, other=0)
                score = tl.dot(q, key, input_precision="ieee")  # float32 [H, KEYS]
                score = tl.where(score > 0, score, tl.where(score <= 0, 0, score))  # keeps NaN
                total += tl.sum(score * gate[:, None], 0)
            bound = tl.load(kv_lens + b * W + w)
            tl.store(line + t, tl.where(t < bound, total, float("-inf")), mask=t < S)
            line += S


@implement("index_logits", "cuda")
def index_logits(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
) -> Tensor:
    args = (query, head_weights, index_keys, page_table, rows, kv_lens)
    if head_weights.dtype == torch.float64 or query.dtype != index_keys.dtype:
        return SPECIFICATIONS["index_logits"](*args)
    (batch, width, heads, dim), (_, page_size, _) = query.shape, index_keys.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    gates = head_weights if head_weights.stride(-1) == 1 else head_weights.contiguous()
    length = page_table.shape[1] * page_size
    out = gates.new_empty((batch, width, length))
    if out.numel():
        grid = (batch, triton.cdiv(width, QUERIES), triton.cdiv(length, KEYS))
        _index_logits[grid](
            query, gates, index_keys, page_table, rows, kv_lens.contiguous(), out,
            width, page_table.stride(0), page_size, length,
            *query.stride()[:3], *gates.stride()[:2],
            HEADS=heads, DIM=dim, BLOCK_H=min(64, max(16, triton.next_power_of_2(heads))),
            BLOCK_D=max(16, triton.next_power_of_2(dim)), KEYS=KEYS, QUERIES=QUERIES,
            CHAINED=CHAINED, launch_pdl=CHAINED,
        )  # fmt: skip
    return out
