# SPDX-License-Identifier: Apache-2.0
"""Which of the tokens' choices fall on this rank's experts, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.registry import SPECIFICATIONS, implement

BLOCK = 256
"""Choices of one program."""


@triton.jit
def _own_experts(
    ids, weights, own, shares, first, count, total, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    follow(CHAINED)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < total
    place = tl.load(ids + lane, mask=inside, other=0) - first
    held = (place >= 0) & (place < count)
    weight = tl.load(weights + lane, mask=inside & held, other=0)
    tl.store(own + lane, tl.where(held, place, -1), mask=inside)
    tl.store(shares + lane, weight, mask=inside)


@implement("own_experts", "cuda")
def own_experts(ids: Tensor, weights: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    if weights.dtype == torch.float64:
        return SPECIFICATIONS["own_experts"](ids, weights, first, count)
    ids, weights = ids.contiguous(), weights.contiguous()
    own, shares = torch.empty_like(ids), torch.empty_like(weights)
    if ids.numel():
        _own_experts[(triton.cdiv(ids.numel(), BLOCK),)](
            ids, weights, own, shares, first, count, ids.numel(), BLOCK=BLOCK, CHAINED=CHAINED,
            num_warps=2, launch_pdl=CHAINED,
        )  # fmt: skip
    return own, shares
