# SPDX-License-Identifier: Apache-2.0
"""Prompt look-up in two launches: parts of a row look for its ending, then the best part is taken.

A match is a number, (its length, its last position), so that the largest is the latest of the
longest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.registry import implement

BLOCK = 1024
"""Positions of one program."""


@triton.jit
def _find(
    tokens, known_lens, rows, found, T, SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + b)
    known = tl.load(known_lens + row)
    text = tokens + row.to(tl.int64) * T
    end = part * BLOCK + tl.arange(0, BLOCK)
    going = end < known - 1
    length = tl.zeros((BLOCK,), tl.int64)
    for back in tl.static_range(LONGEST):
        going = going & (end >= back)
        want = tl.load(text + tl.maximum(known - 1 - back, 0))
        going = going & (tl.load(text + end - back, mask=going, other=0) == want)
        length += going.to(tl.int64)
    best = tl.where(length >= SHORTEST, (length << 32) + end + 1, 0)
    tl.store(found + b * parts + part, tl.max(best, 0))


@triton.jit
def _copy(
    tokens, known_lens, rows, found, guesses, lens, T, parts,
    DEPTH: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows + b)
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(found + b * parts + part, mask=part < parts, other=0), 0)
    after = (best & 0x7FFFFFFF).to(tl.int32)
    column = tl.arange(0, COLUMNS)
    place = tl.minimum(after + column, T - 1)
    inside = column < DEPTH
    text = tokens + row.to(tl.int64) * T
    tl.store(guesses + b * DEPTH + column, tl.load(text + place, mask=inside), mask=inside)
    count = tl.minimum(tl.load(known_lens + row) - after, DEPTH)
    tl.store(lens + b, tl.where(best > 0, count, 0))


@implement("lookup", "cuda")
def lookup(
    tokens: Tensor, known_lens: Tensor, rows: Tensor, depth: int, longest: int, shortest: int
) -> tuple[Tensor, Tensor]:
    batch, length = rows.shape[0], tokens.shape[1]
    parts = triton.cdiv(length, BLOCK)
    found = torch.empty((batch, parts), dtype=torch.int64, device=rows.device)
    guesses, lens = rows.new_empty((batch, depth)), torch.empty_like(rows)
    _find[(batch, parts)](
        tokens, known_lens, rows, found, length, SHORTEST=shortest, LONGEST=longest, BLOCK=BLOCK,
    )  # fmt: skip
    _copy[(batch,)](
        tokens, known_lens, rows, found, guesses, lens, length, parts,
        DEPTH=depth, PARTS=triton.next_power_of_2(parts),
        COLUMNS=triton.next_power_of_2(depth), num_warps=1,
    )  # fmt: skip
    return guesses, lens
