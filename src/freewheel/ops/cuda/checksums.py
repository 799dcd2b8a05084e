# SPDX-License-Identifier: Apache-2.0
"""Checksums of pages: a program sums one layer of one page, and adds that up in device memory.

Integers add up to the same in any order, so these sums are those of the specification.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.checksums import LABEL_BITS, MIX, row_words, words_of
from freewheel.ops.registry import implement

BLOCK = 1024


@triton.jit
def _sum_part(
    words, page_at, place, begin, end,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """int64: of rows `begin` to `end` of a part whose first word is at `page_at`."""
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for first in range(begin * SIZE, end * SIZE, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        inside = lane < end * SIZE
        value = tl.load(words + page_at + lane, mask=inside, other=0).to(tl.int64)
        weight = ((place + lane) * MIX) | 1
        total += value * weight
    return tl.sum(total, 0)


@triton.jit
def _sum_pages(
    words, pages, begins, ends, sums, COUNT, N, ROWS,
    LABEL: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BLOCK: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    cell, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    origin = tl.full([], LABEL, tl.int64) << BITS
    begin, end = tl.load(begins + cell), tl.load(ends + cell)
    if end > begin:
        page = tl.load(pages + cell).to(tl.int64)
        at = (layer * N + page) * COUNT
        own = origin + layer * COUNT
        total = _sum_part(words, at, own, begin, end, FIRST, BLOCK, MIX)
        if SECOND > 0:
            behind = (ROWS * FIRST).to(tl.int64)
            total += _sum_part(words, at + behind, own + behind, begin, end, SECOND, BLOCK, MIX)
        tl.atomic_add(sums + cell, total)


@implement("sum_pages", "cuda")
def sum_pages(
    stored: Tensor,
    pages: Tensor,
    begins: Tensor,
    ends: Tensor,
    sums: Tensor,
    parts: list[int],
    label: int,
) -> None:
    words = words_of(stored)  # int32 [layers, N, words]
    layers, count, size = words.shape
    first, second = (*row_words(stored, parts), 0)[:2]
    if not pages.numel() or not layers:
        return
    _sum_pages[(pages.numel(), layers)](
        words, pages.contiguous(), begins.contiguous(), ends.contiguous(), sums,
        size, count, stored.shape[2],
        LABEL=label, BITS=LABEL_BITS, FIRST=first, SECOND=second, BLOCK=BLOCK, MIX=MIX, num_warps=4,
    )  # fmt: skip
