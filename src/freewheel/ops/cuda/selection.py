# SPDX-License-Identifier: Apache-2.0
"""Top-k: find the k-th best score, then keep in one pass over the positions.

A program serves one query. Scores are mapped to integers of the same order. Up to `BLOCK` of them
stay in registers; of longer rows they are read once for each of four digits (radix 256), and once
more. What is above the threshold is kept, and of what equals it the lowest positions, in ascending
order. No sort, no atomics on results: they do not depend on the order in which anything ran.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.registry import SPECIFICATIONS, implement

BLOCK = 8192
"""Logits held at once."""

METHOD, WARPS = 0, 16


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
def _threshold(key, live, wanted, METHOD: tl.constexpr):
    """The same of keys in registers."""
    prefix = tl.full((), 0, tl.uint32)
    if METHOD == 0:
        for turn in tl.static_range(4):
            shift = 24 - 8 * turn
            some = live
            if turn > 0:
                some = live & ((key >> (shift + 8)) == prefix)
            counts = tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=some)
            found, wanted = _digit(counts, wanted)
            prefix = (prefix << 8) | found.to(tl.uint32)
    else:
        for turn in tl.static_range(16):
            shift = 30 - 2 * turn
            one = prefix | (tl.full((), 1, tl.uint32) << shift)
            two = prefix | (tl.full((), 2, tl.uint32) << shift)
            three = prefix | (tl.full((), 3, tl.uint32) << shift)
            packed = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 20)
            packed += (key >= three).to(tl.int64) << 40
            counts = tl.sum(tl.where(live, packed, 0), 0)
            prefix = tl.where((counts & 0xFFFFF) >= wanted, one, prefix)
            prefix = tl.where(((counts >> 20) & 0xFFFFF) >= wanted, two, prefix)
            prefix = tl.where((counts >> 40) >= wanted, three, prefix)
        wanted -= tl.sum((live & (key > prefix)).to(tl.int32), 0)
    return prefix, wanted


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
def _topk_slots(
    logits, page_table, rows, kv_lens, out, W, S, P, PAGE, K,
    BLOCK: tl.constexpr, METHOD: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    table = page_table + tl.load(rows + query // W).to(tl.int64) * P
    length = tl.minimum(tl.load(kv_lens + query), S)
    own, out = logits + query * S, out + query * K
    lane = tl.arange(0, BLOCK)
    if length <= K:
        for at in range(0, K, BLOCK):
            place = at + lane
            _write_slots(out, place, place, table, PAGE, place < length)
            tl.store(out + place, -1, mask=(place >= length) & (place < K))
    elif length <= BLOCK:
        live = lane < length
        key = ordered_key(tl.load(own + lane, mask=live, other=0))
        prefix, wanted = _threshold(key, live, K, METHOD)
        keep, place, _, _ = _keep(key, live, prefix, wanted, 0, 0)
        _write_slots(out, place, lane, table, PAGE, keep)
    else:
        prefix, wanted = _threshold_of_long(own, length, K, BLOCK)
        above = 0
        ties = 0
        for at in range(0, length, BLOCK):
            live = at + lane < length
            key = ordered_key(tl.load(own + at + lane, mask=live, other=0))
            keep, place, above, ties = _keep(key, live, prefix, wanted, above, ties)
            _write_slots(out, place, at + lane, table, PAGE, keep)


@implement("topk_slots", "cuda")
def topk_slots(
    logits: Tensor, page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, k: int
) -> Tensor:
    if logits.dtype != torch.float32:
        return SPECIFICATIONS["topk_slots"](logits, page_table, rows, kv_lens, page_size, k)
    batch, width, length = logits.shape
    out = torch.empty((batch, width, k), dtype=torch.int32, device=logits.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(max(length, 256)))
        _topk_slots[(batch * width,)](
            logits.contiguous(), page_table, rows, kv_lens.contiguous(), out,
            width, length, page_table.shape[1], page_size, k,
            BLOCK=block, METHOD=METHOD, num_warps=max(4, min(WARPS, block // 256)),
        )  # fmt: skip
    return out
