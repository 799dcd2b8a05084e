# SPDX-License-Identifier: Apache-2.0
"""Top-k: find the k-th best score, then keep in one pass over the positions.

Scores are mapped to integers of the same order. A program holds a whole row of them in registers
while it finds the threshold bit by bit: each of its lanes a few neighbours, so that lanes have to
add up their counts, but not their scores. What is above the threshold is kept, and of what equals
it the lowest positions, in ascending order. Longer rows: `long_selection`. No sort, and no atomics:
results do not depend on the order in which anything ran.

That is what runs where CUDA C++ cannot be compiled (`native.lacking`); elsewhere
`short_selection` and `cluster_selection`, which give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.cluster_selection import select_by_cluster
from freewheel.ops.cuda.long_selection import select_long
from freewheel.ops.cuda.native import lacking
from freewheel.ops.cuda.ordering import find_threshold, ordered_key, write_slots
from freewheel.ops.cuda.short_selection import is_short, select_short
from freewheel.ops.registry import SPECIFICATIONS, implement

__all__ = ["DEEPEST", "LANES", "MOST", "ordered_key", "topk_slots"]

LANES, DEEPEST = 1024, 8
"""Lanes of a program, and scores of one lane at most; longer rows go to several programs."""

MOST = 8192
"""The largest k: counts of what is kept must fit in 16 bits."""


@triton.jit
def _topk_slots(
    logits, page_table, rows, kv_lens, out, W, S, P,
    PAGE: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, DEEP: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    follow(CHAINED)
    length = tl.minimum(tl.load(kv_lens + query), S)
    table = page_table + tl.load(rows + query // W).to(tl.int64) * P
    own, out = logits + query * S + lane * DEEP, out + query * K
    keys = ()
    for nth in tl.static_range(DEEP):
        # A row of at most K scores is kept whole, whatever they are. Key 0 is below any score's.
        live = lane * DEEP + nth < length
        score = tl.load(own + nth, mask=live & (length > K), other=0)
        keys = keys + (tl.where(live, ordered_key(score), 0),)
    best, step = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
    threshold, ties = find_threshold(keys, tl.minimum(length, K), best, step)
    packed = tl.zeros((LANES,), tl.int32)
    for nth in tl.static_range(DEEP):
        live = lane * DEEP + nth < length
        packed += (live & (keys[nth] > threshold)).to(tl.int32)
        packed += (live & (keys[nth] == threshold)).to(tl.int32) << 16
    before = tl.cumsum(packed, 0) - packed
    above_here, ties_here = before & 0xFFFF, before >> 16
    for nth in tl.static_range(DEEP):
        position = lane * DEEP + nth
        above = (position < length) & (keys[nth] > threshold)
        tie = (position < length) & (keys[nth] == threshold)
        place = above_here + tl.minimum(ties_here, ties)
        write_slots(out, place, position, table, PAGE, above | (tie & (ties_here < ties)))
        above_here += above.to(tl.int32)
        ties_here += tie.to(tl.int32)
    if length < K:
        for at in range(0, K, LANES):
            tl.store(out + at + lane, -1, mask=(at + lane >= length) & (at + lane < K))


@implement("topk_slots", "cuda")
def topk_slots(
    logits: Tensor, page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, k: int
) -> Tensor:
    if logits.dtype != torch.float32 or k > MOST:
        return SPECIFICATIONS["topk_slots"](logits, page_table, rows, kv_lens, page_size, k)
    batch, width, length = logits.shape
    out = torch.empty((batch, width, k), dtype=torch.int32, device=logits.device)
    if not out.numel():
        return out
    logits, kv_lens = logits.contiguous(), kv_lens.contiguous()
    if logits.is_cuda and lacking() is None:
        is_own = is_short(batch * width, length, page_size)
        select = select_short if is_own else select_by_cluster
        select(logits, page_table, rows, kv_lens, page_size, out)
        return out
    if length > LANES * DEEPEST:
        select_long(logits, page_table, rows, kv_lens, page_size, out)
        return out
    lanes = max(32, min(LANES, triton.next_power_of_2(triton.cdiv(length, 4))))
    _topk_slots[(batch * width,)](
        logits, page_table, rows, kv_lens, out, width, length, page_table.stride(0),
        PAGE=page_size, K=k, LANES=lanes, DEEP=triton.cdiv(length, lanes), CHAINED=CHAINED,
        num_warps=lanes // 32, launch_pdl=CHAINED,
    )  # fmt: skip
    return out
