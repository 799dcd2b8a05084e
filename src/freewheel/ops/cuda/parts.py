# SPDX-License-Identifier: Apache-2.0
"""Sums whose inputs were shared among programs of another launch: each wrote a part.

Where a weight has few outputs, programs share its inputs among themselves, so that all
multiprocessors read at once. Parts are added in their order, so a sum has one value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow


@triton.jit
def load_sum(at, mask, pitch, kind: tl.constexpr, PARTS: tl.constexpr):
    """float32: the sum of PARTS numbers `pitch` apart, rounded as `add_parts` does to `kind`."""
    total = tl.load(at, mask=mask, other=0).to(tl.float32)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            total += tl.load(at + part * pitch, mask=mask, other=0)
        total = total.to(kind).to(tl.float32)
    return total


@triton.jit
def _add_parts(
    parts, out, SIZE, PARTS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    follow(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * SIZE + at, mask=at < SIZE, other=0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < SIZE)


def room_for_parts(out: Tensor, parts: int) -> Tensor:
    """Where programs write: `out` itself, or float32 [parts, *out.shape] to be added up."""
    if parts == 1:
        return out
    return torch.empty((parts, *out.shape), dtype=torch.float32, device=out.device)


def add_parts(parts: Tensor, out: Tensor) -> Tensor:
    """`out`, set to the sum of `parts` if these are not `out` itself; fewer than 2^31 elements."""
    if parts is not out:
        block = 1024 if out.numel() >= 1 << 18 else 256
        _add_parts[(triton.cdiv(out.numel(), block),)](
            parts, out, out.numel(), PARTS=parts.shape[0], BLOCK=block, CHAINED=CHAINED,
            num_warps=block // 128, launch_pdl=CHAINED,
        )  # fmt: skip
    return out
