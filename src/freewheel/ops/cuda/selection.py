# SPDX-License-Identifier: Apache-2.0
"""Top-k: find the k-th best score, then keep in one pass over the positions.

Scores are mapped to integers of the same order. A program holds `LANES` of them in registers while
it finds the threshold bit by bit. What is above it is kept, and of what equals it the lowest
positions, in ascending order. A longer row goes to several programs, whose picks go to fewer of the
next level: what is not among the best of its part is not among the best. No sort, and no atomics:
results do not depend on the order in which anything ran.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.registry import SPECIFICATIONS, implement

LANES = 8192
"""Scores of one program, unless twice k is more."""

MOST = 8192
"""The largest k: counts of what is kept must fit in 16 bits."""


@triton.jit
def ordered_key(x):
    """uint32 in the order of float32 x: NaN as -inf, -0 as 0."""
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _write_slots(out, lane, position, table, PAGE, keep):
    page = tl.load(table + position // PAGE, mask=keep, other=0)
    tl.store(out + lane, page * PAGE + position % PAGE, mask=keep)


@triton.jit
def _threshold(key, wanted):
    """(key of the `wanted`-th best, how many of its equals are in): bit by bit from the highest.

    Ends when as many keys as wanted are left, whose lowest bits then do not matter. A loop, not
    unrolled: the code must stay small and hot.
    """
    best = tl.full((), 0, tl.uint32)
    step = tl.full((), 0x80000000, tl.uint32)
    reached = wanted + 1
    while (step != 0) & (reached != wanted):
        tried = best | step
        count = tl.sum((key >= tried).to(tl.int32), 0)
        enough = count >= wanted
        best = tl.where(enough, tried, best)
        reached = tl.where(enough, count, reached)
        step = step >> 1
    return best, wanted - tl.sum((key > best).to(tl.int32), 0)


@triton.jit
def _keep(key, live, prefix, wanted):
    """(kept, place of each kept): those above the threshold, and the first `wanted` at it."""
    above, tie = live & (key > prefix), live & (key == prefix)
    packed = tl.cumsum(above.to(tl.int32) + (tie.to(tl.int32) << 16), 0)
    above_here, ties_here = packed & 0xFFFF, packed >> 16
    keep = above | (tie & (ties_here <= wanted))
    return keep, above_here + tl.minimum(ties_here, wanted) - 1


@triton.jit
def _topk_slots(
    logits, lists, kept, page_table, rows, kv_lens, out, W, S, P, PAGE, K, SPAN, LISTS, BELOW,
    FIRST: tl.constexpr, SIZE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One level: program (query, part) keeps K of `LISTS` parts of `SPAN` positions each.

    On the first level these are all of the positions of one part; above, those that the `BELOW`
    programs of the level below kept. A row that fits in the first program is done there.
    """
    query, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, SIZE)
    follow(CHAINED)
    table = page_table + tl.load(rows + query // W).to(tl.int64) * P
    length = tl.minimum(tl.load(kv_lens + query), S)
    own, out = logits + query * S, out + query * K
    first = part * LISTS * SPAN
    if FIRST & (length <= K) & (part == 0):
        for at in range(0, K, SIZE):
            place = at + lane
            _write_slots(out, place, place, table, PAGE, place < length)
            tl.store(out + place, -1, mask=(place >= length) & (place < K))
    done_below = length <= (K if FIRST else SPAN)
    if (length > first) & (done_below == 0):
        if FIRST:
            position = first + lane
            live = position < length
        else:
            nth = lane // K
            live = (nth < LISTS) & (lane % K < length - first - nth * SPAN)
            own_lists = lists + (query * BELOW + part * LISTS) * K
            position = tl.load(own_lists + lane, mask=live, other=0)
        # Key 0 is below that of any score, so that lanes behind the row are never counted.
        key = tl.where(live, ordered_key(tl.load(own + position, mask=live, other=0)), 0)
        prefix, wanted = _threshold(key, K)
        keep, place = _keep(key, live, prefix, wanted)
        if length <= LISTS * SPAN:
            _write_slots(out, place, position, table, PAGE, keep)
        else:
            tl.store(kept + (query * parts + part) * K + place, position, mask=keep)


def _levels(length: int, k: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Lanes of a program, and of each level (parts, lists a part, positions a list)."""
    size = triton.next_power_of_2(max(min(length, max(LANES, 2 * k)), 256))
    levels = [(triton.cdiv(length, size), 1, size)]
    while levels[-1][0] > 1:
        below, lists, span = levels[-1]
        levels.append((triton.cdiv(below, size // k), size // k, lists * span))
    return size, levels


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
    size, levels = _levels(length, k)
    lists, below = out, 0
    for parts, count, span in levels:
        kept = out if parts == 1 else out.new_empty((batch * width, parts, k))
        _topk_slots[(batch * width, parts)](
            logits, lists, kept, page_table, rows, kv_lens, out,
            width, length, page_table.stride(0), page_size, k, span, count, below,
            FIRST=not below, SIZE=size, CHAINED=CHAINED,
            num_warps=max(4, min(16, size // 512)), launch_pdl=CHAINED,
        )  # fmt: skip
        lists, below = kept, parts
    return out
