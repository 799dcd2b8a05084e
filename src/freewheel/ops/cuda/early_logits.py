# SPDX-License-Identifier: Apache-2.0
"""Index logits of rows that are not long, on Hopper, with layouts and waits written out.

As `indexing._index_logits`, but for whole blocks of a page: a block's keys are found by one look at
the page table, and the next two blocks are on their way while one is scored, as are the queries
while the first is awaited.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from freewheel.ops.cuda.explicit import barrier, follow

DIM, KEYS = 128, 64
HEADS = (32, 64)

BUFFERS = 3
"""Blocks of keys in shared memory."""

COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
FILLS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
KEYS_SHARED = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16))


def serves(query: Tensor, gates: Tensor, keys: Tensor) -> bool:
    """Whether this kernel is for such queries and keys: its instructions are Hopper's."""
    fits = query.is_cuda and query.dtype == keys.dtype == torch.bfloat16
    fits = fits and gates.dtype == torch.float32 and keys.shape[1] % KEYS == 0
    fits = fits and query.shape[2] in HEADS and query.shape[3] == DIM
    return fits and torch.cuda.get_device_capability(query.device)[0] == 9


def aligned(query: Tensor) -> Tensor:
    """The query itself if its heads can be copied 16 bytes at a time."""
    even = query.stride(-1) == 1 and all(stride % 8 == 0 for stride in query.stride()[:3])
    return query if even and query.data_ptr() % 16 == 0 else query.clone().contiguous()


@gluon.jit
def _page_at(pages, at, longest, PAGE: gl.constexpr):
    """The first row of the block at position `at`; 0 if there is none."""
    page = gl.load(pages + at // PAGE, mask=at < longest, other=0)
    return page.to(gl.int64) * PAGE + at % PAGE


@gluon.jit
def _fetch(buffer, keys, row, there):
    """Start copying the 64 keys from `row` on."""
    nth = gl.arange(0, 64, gl.SliceLayout(1, COPIES))
    d = gl.arange(0, 128, gl.SliceLayout(0, COPIES))
    own = keys + row * 128 + nth[:, None] * 128 + d[None, :]
    async_copy.async_copy_global_to_shared(buffer, own, mask=(nth >= 0)[:, None] & there)
    async_copy.commit_group()


@gluon.jit
def _fetch_queries(buffer, query, first, W, qw, qh, HEADS: gl.constexpr, QUERIES: gl.constexpr):
    """Start copying all heads of the program's queries."""
    column = gl.arange(0, QUERIES * HEADS, gl.SliceLayout(1, COPIES))
    d = gl.arange(0, 128, gl.SliceLayout(0, COPIES))
    nth = first + column // HEADS
    own = query + (nth * qw + column % HEADS * qh)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(buffer, own, mask=(nth < W)[:, None])
    async_copy.commit_group()


@gluon.jit
def _store(score, gate, line, at, bounds_at, first, W, S, QUERIES: gl.constexpr):
    """Sum each query's heads of float32 [64, QUERIES * HEADS] and store them at position `at`."""
    score = gl.inline_asm_elementwise(
        "max.NaN.f32 $0, $1, 0f00000000;",
        "=f,f", [score], dtype=gl.float32, is_pure=True, pack=1,
    ) * gate[None, :]  # fmt: skip
    total = gl.sum(gl.reshape(score, [64, QUERIES, score.shape[1] // QUERIES]), 2)
    layout: gl.constexpr = total.type.layout
    t = at + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    w = gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
    bounds = gl.load(bounds_at + w, mask=first + w < W, other=0)[None, :]
    w = w[None, :]
    total = gl.where(t < bounds, total, float("-inf"))
    gl.store(line + w * S + t, total, mask=(first + w < W) & (t < S))


@gluon.jit
def _fill(line, begin, step, longest, first, W, S, QUERIES: gl.constexpr):
    """-inf in the program's blocks that no key is in."""
    lane = gl.arange(0, 64, FILLS)
    nothing = gl.full([64], float("-inf"), gl.float32, FILLS)
    for at in range(begin, S, step):
        for nth in gl.static_range(QUERIES):
            live = (at + lane < S) & (at >= longest) & (first + nth < W)
            gl.store(line + nth * S + at + lane, nothing, mask=live)


@gluon.jit
def _longest(bounds_at, first, W, S, SKIP, QUERIES: gl.constexpr):
    """The longest of the program's queries' lengths; 0 where none is longer than SKIP."""
    longest = 0
    for nth in gl.static_range(QUERIES):
        own = gl.load(bounds_at + nth, mask=first + nth < W, other=0)
        longest = gl.maximum(longest, gl.minimum(own, S))
    return gl.where(longest <= SKIP, 0, longest)


@gluon.jit
def early_logits(
    query, gates, keys, table, rows, kv_lens, out, W, P, S, SKIP, qb, qw, qh, gb, gw,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, PAGE: gl.constexpr, BUFFERS: gl.constexpr,
    FILL: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Program (row, queries, blocks of keys); all else as `indexing._index_logits`."""
    columns: gl.constexpr = QUERIES * HEADS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([columns, 128], gl.bfloat16)
    asked = gl.allocate_shared_memory(gl.bfloat16, [columns, 128], shared)
    blocks = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, 64, 128], KEYS_SHARED)
    follow(CHAINED)
    b, first = gl.program_id(0).to(gl.int64), gl.program_id(1) * QUERIES
    bounds_at = kv_lens + b * W + first
    longest = _longest(bounds_at, first, W, S, SKIP, QUERIES)
    begin, step = gl.program_id(2) * 64, gl.num_programs(2) * 64
    line = out + (b * W + first) * S
    if begin < longest:
        _fetch_queries(asked, query + b * qb, first, W, qw, qh, HEADS, QUERIES)
        pages = table + gl.load(rows + b).to(gl.int64) * P
        for nth in gl.static_range(BUFFERS - 1):
            at = begin + nth * step
            _fetch(blocks.index(nth), keys, _page_at(pages, at, longest, PAGE), at < longest)
        ahead = _page_at(pages, begin + (BUFFERS - 1) * step, longest, PAGE)
        column = gl.arange(0, columns, gl.SliceLayout(0, mma))
        nth = first + column // HEADS
        gate = gl.load(gates + b * gb + nth * gw + column % HEADS, mask=nth < W, other=0)
        zero = gl.zeros([64, columns], gl.float32, mma)
        which, free = 0, BUFFERS - 1
        for at in range(begin, longest, step):
            async_copy.wait_group(BUFFERS - 2)
            barrier()
            score = warpgroup_mma(
                blocks.index(which), asked.permute((1, 0)), zero, use_acc=False, is_async=True
            )
            next_at = at + (BUFFERS - 1) * step
            _fetch(blocks.index(free), keys, ahead, next_at < longest)
            ahead = _page_at(pages, next_at + step, longest, PAGE)
            score = warpgroup_mma_wait(0, deps=(score,))
            _store(score, gate, line, at, bounds_at, first, W, S, QUERIES)
            which = gl.where(which == BUFFERS - 1, 0, which + 1)
            free = gl.where(free == BUFFERS - 1, 0, free + 1)
    if FILL:
        _fill(line, begin, step, longest, first, W, S, QUERIES)
