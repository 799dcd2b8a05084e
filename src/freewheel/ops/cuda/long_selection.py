# SPDX-License-Identifier: Apache-2.0
"""Top-k of long rows by several programs a row, in three launches.

Scores fall into bins by the upper bits of their half-precision value, which keeps their order.
First every part of a row counts its scores by bin. Then the bin is known in which the k-th best
lies, and each part lists its positions in that bin, at a place that the counts give. Last, every
part finds the exact threshold among those few, and keeps what is above it, and of what equals it
the lowest positions. Parts follow the row's own length: a short row in a long table costs little.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.ordering import (
    find_threshold,
    first_difference,
    ordered_key,
    write_slots,
)

BINS = 512
"""Sign, five bits of exponent, three of mantissa."""

TILE, WARPS = 4096, 8
"""Scores that a program looks at together."""

FEW = 2048
"""Candidates for the threshold held in registers; more are read again for every bit."""

PROGRAMS, MOST_PARTS = 264, 32
"""Programs that run at once on an H200, and parts of one row at most."""


@triton.jit
def _bin_of(x):
    """int32 below 512 in the order of float32 x, equal for equal x; NaN as -inf."""
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0, 0.0, x).to(tl.float16)
    bits = x.to(tl.uint16, bitcast=True).to(tl.int32)
    return tl.where(bits >> 15 != 0, bits ^ 0xFFFF, bits | 0x8000) >> 7


@triton.jit
def _span(kv_lens, query, S, K, part, parts, TILE: tl.constexpr):
    """(length, first and last position but one of the part); nothing where all are kept."""
    length = tl.minimum(tl.load(kv_lens + query), S)
    each = tl.cdiv(tl.cdiv(length, parts), TILE) * TILE
    begin = part * each
    end = tl.where(length <= K, begin, tl.minimum(begin + each, length))
    return length, begin, end


@triton.jit
def _count_bins(
    logits, kv_lens, counts, S, K, BINS: tl.constexpr, TILE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    query, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    _, begin, end = _span(kv_lens, query, S, K, part, parts, TILE)
    own = logits + query * S
    count = tl.zeros((BINS,), tl.int32)
    for at in range(begin, end, TILE):
        lane = at + tl.arange(0, TILE)
        score = tl.load(own + lane, mask=lane < end, other=0)
        count += tl.histogram(_bin_of(score), BINS, mask=lane < end)
    tl.store(counts + (query * parts + part) * BINS + tl.arange(0, BINS), count)


@triton.jit
def _list_candidates(
    logits, kv_lens, counts, places, listed, S, K, parts,
    BINS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Into `listed` the part's positions in the threshold's bin; into `places` four numbers.

    Scores of earlier parts above the bin, candidates of earlier parts, candidates in all, and how
    many of them are wanted.
    """
    follow(CHAINED)
    query, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, begin, end = _span(kv_lens, query, S, K, part, parts, TILE)
    if length > K:
        nth, each = tl.arange(0, PARTS)[:, None], tl.arange(0, BINS)
        own_counts = counts + (query * parts + nth) * BINS + each[None, :]
        count = tl.load(own_counts, mask=nth < parts, other=0)  # [PARTS, BINS]
        row = tl.sum(count, 0)
        reaching = length - tl.cumsum(row, 0) + row  # scores in a bin or above it
        middle = tl.max(tl.where(reaching >= K, each, -1), 0)
        above = tl.sum(tl.where(each > middle, row, 0), 0)
        candidates = tl.sum(tl.where(each == middle, row, 0), 0)
        earlier = tl.where(nth < part, count, 0)
        above_before = tl.sum(tl.sum(tl.where((each > middle)[None, :], earlier, 0), 0), 0)
        before = tl.sum(tl.sum(tl.where((each == middle)[None, :], earlier, 0), 0), 0)
        place = places + (query * parts + part) * 4
        tl.store(place, above_before)
        tl.store(place + 1, before)
        tl.store(place + 2, candidates)
        tl.store(place + 3, K - above)
        target = listed + query * S + before
        for at in range(begin, end, TILE):
            lane = at + tl.arange(0, TILE)
            score = tl.load(logits + query * S + lane, mask=lane < end, other=0)
            found = (lane < end) & (_bin_of(score) == middle)
            nth_here = tl.cumsum(found.to(tl.int32), 0)
            tl.store(target + nth_here - 1, lane, mask=found)
            target += tl.sum(found.to(tl.int32), 0)


@triton.jit
def _candidate_keys(own, listed, at, candidates, SIZE: tl.constexpr):
    lane = at + tl.arange(0, SIZE)
    position = tl.load(listed + lane, mask=lane < candidates, other=0)
    score = tl.load(own + position, mask=lane < candidates, other=0)
    return lane, tl.where(lane < candidates, ordered_key(score), 0)


@triton.jit
def _counted(own, listed, candidates, least, before, SIZE: tl.constexpr):
    """(candidates of at least key `least`, those of them among the first `before`)."""
    count, earlier = 0, 0
    for at in range(0, candidates, SIZE):
        lane, key = _candidate_keys(own, listed, at, candidates, SIZE)
        found = (key >= least).to(tl.int32)
        count += tl.sum(found, 0)
        earlier += tl.sum(tl.where(lane < before, found, 0), 0)
    return count, earlier


@triton.jit
def _threshold_of_many(own, listed, candidates, wanted, SIZE: tl.constexpr):
    """As `find_threshold`, of keys that are read for every bit."""
    best = tl.full((), 0, tl.uint32)
    step = tl.full((), 0x80000000, tl.uint32)
    while step != 0:
        tried = best | step
        count, _ = _counted(own, listed, candidates, tried, 0, SIZE)
        best = tl.where(count >= wanted, tried, best)
        step = step >> 1
    above, _ = _counted(own, listed, candidates, best + 1, 0, SIZE)
    return best, wanted - above


@triton.jit
def _keep_best(
    logits, page_table, rows, kv_lens, places, listed, out, W, S, P, K,
    PAGE: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    query, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    length, begin, end = _span(kv_lens, query, S, K, part, parts, TILE)
    table = page_table + tl.load(rows + query // W).to(tl.int64) * P
    own, listed, out = logits + query * S, listed + query * S, out + query * K
    if (length <= K) & (part == 0):
        for at in range(0, K, TILE):
            lane = at + tl.arange(0, TILE)
            write_slots(out, lane, lane, table, PAGE, lane < length)
            tl.store(out + lane, -1, mask=(lane >= length) & (lane < K))
    if begin < end:
        place = places + (query * parts + part) * 4
        before, candidates = tl.load(place + 1), tl.load(place + 2)
        wanted = tl.load(place + 3)
        if candidates <= FEW:
            nth, key = _candidate_keys(own, listed, 0, candidates, FEW)
            # Keys of one bin begin alike.
            low = tl.min(tl.where(nth < candidates, key, 0xFFFFFFFF), 0)
            best, step = first_difference(low, tl.max(key, 0))
            reached, _ = find_threshold((key,), wanted, best, step)
            threshold = tl.min(tl.where(key >= reached, key, 0xFFFFFFFF), 0)
            above, tie = (key > threshold).to(tl.int32), (key == threshold).to(tl.int32)
            ties = wanted - tl.sum(above, 0)
            above_before = tl.sum(tl.where(nth < before, above, 0), 0)
            ties_before = tl.sum(tl.where(nth < before, tie, 0), 0)
        else:
            threshold, ties = _threshold_of_many(own, listed, candidates, wanted, FEW)
            _, above_before = _counted(own, listed, candidates, threshold + 1, before, FEW)
            _, reaching = _counted(own, listed, candidates, threshold, before, FEW)
            ties_before = reaching - above_before
        above_before += tl.load(place)
        for at in range(begin, end, TILE):
            lane = at + tl.arange(0, TILE)
            key = ordered_key(tl.load(own + lane, mask=lane < end, other=0))
            above, tie = (lane < end) & (key > threshold), (lane < end) & (key == threshold)
            packed = tl.cumsum(above.to(tl.int32) + (tie.to(tl.int32) << 16), 0)
            above_here, ties_here = above_before + (packed & 0xFFFF), ties_before + (packed >> 16)
            keep = above | (tie & (ties_here <= ties))
            write_slots(out, above_here + tl.minimum(ties_here, ties) - 1, lane, table, PAGE, keep)
            above_before += tl.sum(above.to(tl.int32), 0)
            ties_before += tl.sum(tie.to(tl.int32), 0)


def select_long(
    logits: Tensor, page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> None:
    """Into `out`, int32 [B, W, k], as `topk_slots` gives it."""
    (batch, width, length), k = logits.shape, out.shape[2]
    queries = batch * width
    parts = min(MOST_PARTS, triton.cdiv(length, TILE), max(1, PROGRAMS // queries))
    counts = out.new_empty((queries, parts, BINS))
    places, listed = out.new_empty((queries, parts, 4)), out.new_empty((queries, length))
    grid, options = (queries, parts), {"num_warps": WARPS, "launch_pdl": CHAINED}
    _count_bins[grid](
        logits, kv_lens, counts, length, k, BINS=BINS, TILE=TILE, CHAINED=CHAINED, **options
    )
    _list_candidates[grid](
        logits, kv_lens, counts, places, listed, length, k, parts,
        BINS=BINS, PARTS=triton.next_power_of_2(parts), TILE=TILE, CHAINED=CHAINED, **options,
    )  # fmt: skip
    _keep_best[grid](
        logits, page_table, rows, kv_lens, places, listed, out, width, length,
        page_table.stride(0), k, PAGE=page_size, TILE=TILE, FEW=FEW, CHAINED=CHAINED, **options,
    )  # fmt: skip
