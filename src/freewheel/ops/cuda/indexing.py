# SPDX-License-Identifier: Apache-2.0
"""Index logits: a program scores every so-many-th block of one row's keys, for a few queries.

Keys are read through the row's page table, the next block while one is scored. All heads of all
queries of a program stand side by side in one product, whose left side are the keys: so a key's
sum over heads stays within four threads. Blocks behind the longest length are not looked at.
On Hopper `early_logits` does the same for whole blocks of a page, and `group_logits` for long rows,
where CUDA C++ can be compiled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda import early_logits as explicit
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.group_logits import is_served, logits_by_groups
from freewheel.ops.registry import SPECIFICATIONS, implement

KEYS, WARPS, STAGES = 64, 4, 2
"""Keys of one block, and how it is worked on: the next block's are on their way meanwhile."""

COLUMNS = 256
"""Heads of all queries of one program, at most: the width of a matrix instruction."""

PROGRAMS = {1: 528, 2: 396}
"""Queries of a program -> programs that run at once on an H200; 264 of more queries."""


@triton.jit
def _index_logits(
    query, gates, keys, table, rows, kv_lens, out,
    W, P, PAGE, S, SKIP, qb, qw, qh, gb, gw,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, FILL: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Rows none of whose queries here sees more than SKIP keys are left out.

    FILL: write -inf behind the lengths.
    """
    follow(CHAINED)
    b, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * QUERIES
    w, every, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    real = first + w < W
    bounds = tl.load(kv_lens + b * W + first + w, mask=real, other=0)
    longest = tl.minimum(tl.max(bounds, 0), S)
    longest = tl.where(longest <= SKIP, 0, longest)
    line = out + (b * W + first) * S + w[None, :] * S
    begin, step = tl.program_id(2) * KEYS, tl.num_programs(2) * KEYS
    column = tl.arange(0, QUERIES * BLOCK_H)
    nth, h = first + column // BLOCK_H, column % BLOCK_H
    inside = (nth < W) & (h < HEADS)
    q = query + b * qb + nth[None, :] * qw + h[None, :] * qh + d[:, None]
    q = tl.load(q, mask=inside[None, :] & (d < DIM)[:, None], other=0)  # [D, QUERIES * H]
    gate = tl.load(gates + b * gb + nth * gw + h, mask=inside, other=0)
    pages = table + tl.load(rows + b).to(tl.int64) * P
    for at in tl.range(begin, longest, step, num_stages=STAGES):
        t = at + every
        seen = t < longest
        page = tl.load(pages + t // PAGE, mask=seen, other=0).to(tl.int64)
        own = keys + (page * PAGE + t % PAGE)[:, None] * DIM + d[None, :]
        key = tl.load(own, mask=seen[:, None] & (d < DIM)[None, :], other=0)  # [KEYS, D]
        score = tl.dot(key, q, input_precision="ieee")  # float32 [KEYS, QUERIES * H]
        score = tl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL) * gate[None, :]
        total = tl.sum(tl.reshape(score, (KEYS, QUERIES, BLOCK_H)), 2)
        total = tl.where(t[:, None] < bounds[None, :], total, float("-inf"))
        tl.store(line + t[:, None], total, mask=real[None, :] & (t < S)[:, None])
    if FILL:
        nothing = tl.full((KEYS, QUERIES), float("-inf"), tl.float32)
        for at in range(begin, S, step):
            t = at + every
            behind = (t < S)[:, None] & (at >= longest)
            tl.store(line + t[:, None], nothing, mask=real[None, :] & behind)


def queries_of(width: int, heads: int) -> int:
    """Queries of one program: a power of two. A block of keys costs as much as half a query."""
    few = [1 << n for n in range(4) if heads << n <= max(COLUMNS, heads)]
    return min(few, key=lambda queries: triton.cdiv(width, queries) * (2 * queries + 1))


def _is_plain(query: Tensor, head_weights: Tensor, index_keys: Tensor) -> bool:
    """Whether the kernel serves for these dtypes and so many heads."""
    same = head_weights.dtype == torch.float32 and query.dtype == index_keys.dtype
    return same and query.dtype != torch.float64 and query.shape[2] <= COLUMNS


@implement("index_logits", "cuda")
def index_logits(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    skip: int = 0,
) -> Tensor:
    room = page_table.shape[1] * index_keys.shape[1]
    if is_served(query, head_weights, index_keys, room, packed=False):
        args = (query, head_weights, index_keys, page_table, rows, kv_lens, skip)
        return logits_by_groups(*args)
    if not _is_plain(query, head_weights, index_keys):
        args = (query, head_weights, index_keys, page_table, rows, kv_lens)
        return SPECIFICATIONS["index_logits"](*args)
    (batch, width, heads, dim), (_, page_size, _) = query.shape, index_keys.shape
    gates = head_weights if head_weights.stride(-1) == 1 else head_weights.contiguous()
    length = page_table.shape[1] * page_size
    out = gates.new_empty((batch, width, length))
    if out.numel():
        short, block = query.element_size() == 2, max(16, triton.next_power_of_2(heads))
        queries = queries_of(width, block) if short else 1
        groups = triton.cdiv(width, queries)
        share = max(1, PROGRAMS.get(queries, 264) // (batch * groups))
        grid = (batch, groups, min(share, triton.cdiv(length, KEYS)))
        if explicit.serves(query, gates, index_keys):
            query = explicit.aligned(query)
            explicit.early_logits[grid](
                query, gates, index_keys, page_table, rows, kv_lens.contiguous(), out, width,
                page_table.stride(0), length, skip, *query.stride()[:3], *gates.stride()[:2],
                HEADS=heads, QUERIES=queries, PAGE=page_size, BUFFERS=explicit.BUFFERS,
                FILL=not skip, CHAINED=CHAINED, num_warps=4, launch_pdl=CHAINED,
            )  # fmt: skip
            return out
        query = query if query.stride(-1) == 1 else query.contiguous()
        _index_logits[grid](
            query, gates, index_keys, page_table, rows, kv_lens.contiguous(), out,
            width, page_table.stride(0), page_size, length, skip,
            *query.stride()[:3], *gates.stride()[:2],
            HEADS=heads, DIM=dim, BLOCK_H=block, BLOCK_D=max(16, triton.next_power_of_2(dim)),
            KEYS=KEYS, QUERIES=queries, FILL=not skip, STAGES=STAGES if short else 1,
            CHAINED=CHAINED, num_warps=WARPS, launch_pdl=CHAINED,
        )  # fmt: skip
    return out
