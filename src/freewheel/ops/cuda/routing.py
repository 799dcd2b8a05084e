# SPDX-License-Identifier: Apache-2.0
"""Routes of tokens by a block each, from parts of their logits: `sources/route_tokens.cu`."""

from __future__ import annotations

import triton
from torch import Tensor

from freewheel.ops.cuda.native import Kernel, lacking

KERNEL = Kernel("route_tokens", "ppppfi")

MOST_EXPERTS, MOST_CHOICES = 1024, 32
"""A thread an expert; a lane of a warp a choice, or a group."""


def serves(x: Tensor, experts: int, groups: int, top_k: int) -> bool:
    """Whether the kernel routes among so many, where x is."""
    fits = x.is_cuda and experts <= MOST_EXPERTS and max(groups, top_k) <= MOST_CHOICES
    return fits and experts >= 2 * groups and lacking() is None


def route_by_block(
    parts: Tensor,  # float32 [P, tokens, E], contiguous; their sum is the logits
    bias: Tensor,  # float32 [E]
    weights: Tensor,  # float32 [tokens, top_k], contiguous, as are ids
    ids: Tensor,  # int32 [tokens, top_k]
    groups: tuple[int, int],  # how many there are, and are kept
    scale: float,
    normalise: bool,
    softplus: bool,
) -> None:
    """Sets weights and ids to what `route` gives; `softplus`: to what `route_best` gives."""
    (count, tokens, experts), top_k = parts.shape, ids.shape[-1]
    threads = triton.cdiv(experts, 32) * 32
    KERNEL.launch(
        tokens, threads, 8 * threads + 128, parts, bias, weights, ids, scale, tokens,
        EXPERTS=experts, THREADS=threads, PARTS=count, GROUPS=groups[0], TOP_GROUPS=groups[1],
        TOP_K=top_k, NORMALISE=int(normalise), SOFTPLUS=int(softplus),
    )  # fmt: skip
