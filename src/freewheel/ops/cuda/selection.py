# SPDX-License-Identifier: Apache-2.0
"""Top-k: find the k-th best score digit by digit, then keep in one pass over the positions.

A program serves one query and reads its logits five times, up to its length: four passes count the
digits (radix 256) of scores mapped to integers of the same order, the fifth writes what is above
the threshold, and of what equals it the lowest positions, in ascending order. No sort, no atomics:
the result does not depend on the order in which anything ran.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.registry import SPECIFICATIONS, implement

BLOCK = 4096
"""Logits held at once."""


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
def _topk_slots(logits, page_table, rows, kv_lens, out, W, S, P, PAGE, K, BLOCK: tl.constexpr):
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
    else:
        prefix = tl.full((), 0, tl.uint32)  # digits of the threshold found so far
        wanted = K  # how many of the scores with that prefix are in
        digit = tl.arange(0, 256)
        for turn in tl.static_range(4):
            shift = 24 - 8 * turn
            counts = tl.zeros((256,), tl.int32)
            for at in range(0, length, BLOCK):
                live = at + lane < length
                key = ordered_key(tl.load(own + at + lane, mask=live, other=0))
                if turn > 0:
                    live = live & ((key >> (shift + 8)) == prefix)
                counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=live)
            from_here_up = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
            found = tl.sum((from_here_up >= wanted).to(tl.int32), 0) - 1
            above = tl.sum(tl.where(digit == found, from_here_up - counts, 0), 0)
            wanted -= above
            prefix = (prefix << 8) | found.to(tl.uint32)
        kept_before = 0
        ties_before = 0
        for at in range(0, length, BLOCK):
            live = at + lane < length
            key = ordered_key(tl.load(own + at + lane, mask=live, other=0))
            tie = live & (key == prefix)
            rank = ties_before + tl.cumsum(tie.to(tl.int32), 0)
            keep = (live & (key > prefix)) | (tie & (rank <= wanted))
            place = kept_before + tl.cumsum(keep.to(tl.int32), 0) - 1
            _write_slots(out, place, at + lane, table, PAGE, keep)
            kept_before += tl.sum(keep.to(tl.int32), 0)
            ties_before += tl.sum(tie.to(tl.int32), 0)


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
            BLOCK=block, num_warps=max(4, min(16, block // 256)),
        )  # fmt: skip
    return out
