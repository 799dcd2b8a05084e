# SPDX-License-Identifier: Apache-2.0
"""Top-k: find the k-th best score, then keep in one pass over the positions.

A program serves one query. Scores are mapped to integers of the same order. Up to `LARGE` of them
stay in registers while the threshold is found bit by bit; longer rows are read once for each of
four digits, and once more. What is above the threshold is kept, and of what equals it the lowest
positions, in ascending order. No sort, and no atomics on results: they do not depend on the order
in which anything ran.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.registry import SPECIFICATIONS, implement

SMALL, LARGE = 8192, 32768
"""Scores held in registers: of a short row, so that it is not slowed down, and at most."""


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
def _digit(counts, wanted):
    """(digit of the threshold, how many of its equals in this digit are still wanted)."""
    from_here_up = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    found = tl.sum((from_here_up >= wanted).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(tl.arange(0, 256) == found, from_here_up - counts, 0), 0)
    return found, wanted - above


@triton.jit
def _threshold_of_long(own, length, wanted, BLOCK: tl.constexpr):
    """(key of the `wanted`-th best of float32 own[:length], how many of its equals are in)."""
    lane = tl.arange(0, BLOCK)
    prefix = tl.full((), 0, tl.uint32)
    for turn in tl.static_range(4):
        shift = 24 - 8 * turn
        counts = tl.zeros((256,), tl.int32)
        for at in range(0, length, BLOCK):
            live = at + lane < length
            key = ordered_key(tl.load(own + at + lane, mask=live, other=0))
            if turn > 0:
                live = live & ((key >> (shift + 8)) == prefix)
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=live)
        found, wanted = _digit(counts, wanted)
        prefix = (prefix << 8) | found.to(tl.uint32)
    return prefix, wanted


@triton.jit
def _threshold(key, wanted):
    """The same of keys in registers. A loop, not unrolled: the code must stay small and hot."""
    best = tl.full((), 0, tl.uint32)
    for bit in range(32):
        tried = best | (tl.full((), 0x80000000, tl.uint32) >> bit)
        best = tl.where(tl.sum((key >= tried).to(tl.int32), 0) >= wanted, tried, best)
    return best, wanted - tl.sum((key > best).to(tl.int32), 0)


@triton.jit
def _keep(key, live, prefix, wanted, above_before, ties_before):
    """(kept, place of each kept, above and ties up to here). At most 2^16 keys at once."""
    above, tie = live & (key > prefix), live & (key == prefix)
    packed = tl.cumsum(above.to(tl.int32) + (tie.to(tl.int32) << 16), 0)
    above_here, ties_here = above_before + (packed & 0xFFFF), ties_before + (packed >> 16)
    keep = above | (tie & (ties_here <= wanted))
    place = above_here + tl.minimum(ties_here, wanted) - 1
    return keep, place, tl.max(above_here, 0), tl.max(ties_here, 0)


@triton.jit
def _select_short(own, length, out, table, PAGE, K, SIZE: tl.constexpr):
    """Of float32 own[:length], which fits in `SIZE`, longer than K."""
    lane = tl.arange(0, SIZE)
    live = lane < length
    # Key 0 is below that of any score, so that lanes behind the row are never counted.
    key = tl.where(live, ordered_key(tl.load(own + lane, mask=live, other=0)), 0)
    prefix, wanted = _threshold(key, K)
    keep, place, _, _ = _keep(key, live, prefix, wanted, 0, 0)
    _write_slots(out, place, lane, table, PAGE, keep)


@triton.jit
def _select_long(own, length, out, table, PAGE, K, SIZE: tl.constexpr):
    """The same, `SIZE` at a time."""
    prefix, wanted = _threshold_of_long(own, length, K, SIZE)
    lane = tl.arange(0, SIZE)
    above = 0
    ties = 0
    for at in range(0, length, SIZE):
        live = at + lane < length
        key = ordered_key(tl.load(own + at + lane, mask=live, other=0))
        keep, place, above, ties = _keep(key, live, prefix, wanted, above, ties)
        _write_slots(out, place, at + lane, table, PAGE, keep)


@triton.jit
def _topk_slots(
    logits, page_table, rows, kv_lens, out, W, S, P, PAGE, K,
    SMALL: tl.constexpr, LARGE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    table = page_table + tl.load(rows + query // W).to(tl.int64) * P
    length = tl.minimum(tl.load(kv_lens + query), S)
    own, out = logits + query * S, out + query * K
    if length <= K:
        for at in range(0, K, SMALL):
            place = at + tl.arange(0, SMALL)
            _write_slots(out, place, place, table, PAGE, place < length)
            tl.store(out + place, -1, mask=(place >= length) & (place < K))
    elif length <= SMALL:
        _select_short(own, length, out, table, PAGE, K, SMALL)
    elif LARGE > SMALL:
        if length <= LARGE:
            _select_short(own, length, out, table, PAGE, K, LARGE)
        elif LONG:
            _select_long(own, length, out, table, PAGE, K, SMALL)


@implement("topk_slots", "cuda")
def topk_slots(
    logits: Tensor, page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, k: int
) -> Tensor:
    if logits.dtype != torch.float32:
        return SPECIFICATIONS["topk_slots"](logits, page_table, rows, kv_lens, page_size, k)
    batch, width, length = logits.shape
    out = torch.empty((batch, width, k), dtype=torch.int32, device=logits.device)
    if out.numel():
        whole = triton.next_power_of_2(max(length, 256))
        small, large = min(SMALL, whole), min(LARGE, whole)
        _topk_slots[(batch * width,)](
            logits.contiguous(), page_table, rows, kv_lens.contiguous(), out,
            width, length, page_table.stride(0), page_size, k,
            SMALL=small, LARGE=large, LONG=whole > large,
            num_warps=max(4, min(16 if large == small else 32, large // 512)),
        )  # fmt: skip
    return out
