# SPDX-License-Identifier: Apache-2.0
"""What kernels that pick the best scores share: keys of scores, their threshold, slots of picks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_key(x):
    """uint32 in the order of float32 x: NaN as -inf, -0 as 0."""
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def write_slots(out, lane, position, table, PAGE: tl.constexpr, keep):
    """Store the slots of `position`, where kept, at `lane` of `out`; `table`: the row's pages."""
    page = tl.load(table + position // PAGE, mask=keep, other=0)
    tl.store(out + lane, page * PAGE + position % PAGE, mask=keep)


@triton.jit
def first_difference(low, high):
    """(bits that all keys from `low` to `high` begin with, the bit behind them)."""
    below = low ^ high
    for shift in tl.static_range(5):
        below |= below >> (1 << shift)  # all ones from the first difference on
    return high & (below ^ 0xFFFFFFFF), below - (below >> 1)


@triton.jit
def find_threshold(keys, wanted, best, step):
    """(key of the `wanted`-th best, how many of its equals are in), bit by bit from `step` on.

    `keys`: a tuple of tensors of one shape; all of their elements count.
    `best`: the bits before it, which the wanted key is known to begin with; 0 and the highest bit
    if none. Ends when as many keys as wanted are left, whose lowest bits then do not matter. A
    loop, not unrolled: the code must stay small and hot.
    """
    reached = wanted + 1
    while (step != 0) & (reached != wanted):
        tried = best | step
        reaching = (keys[0] >= tried).to(tl.int32)
        for nth in tl.static_range(1, len(keys)):
            reaching += (keys[nth] >= tried).to(tl.int32)
        count = tl.sum(reaching, 0)
        enough = count >= wanted
        best = tl.where(enough, tried, best)
        reached = tl.where(enough, count, reached)
        step = step >> 1
    above = (keys[0] > best).to(tl.int32)
    for nth in tl.static_range(1, len(keys)):
        above += (keys[nth] > best).to(tl.int32)
    return best, wanted - tl.sum(above, 0)
