# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA of a few queries and its values, with one launch behind the runs of attention.

Runs are joined by the clusters that project (`sources/join_values.cu`), whose weights are there
before the runs are. For more queries the blocks that join wait for one another too long.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from freewheel.ops.cuda.attention import runs_of
from freewheel.ops.cuda.latents import expand_values
from freewheel.ops.cuda.native import Kernel, lacking
from freewheel.ops.cuda.runs import attend_by_runs
from freewheel.ops.latents import values_apart
from freewheel.ops.registry import implement

KERNEL = Kernel("join_values", "pppppi")

CLUSTER, THREADS, RANK, VALUE, MOST_PARTS = 8, 256, 512, 128, 32
"""Blocks that share a head, their threads, and sizes that they are made for."""

FEW, TOKENS, MOST_QUERIES = 8, 16, 32
"""Queries of a cluster where there are no more, and else; queries up to which it is faster."""


def serves(query: Tensor, latent: Tensor, value_up: Tensor) -> bool:
    """Whether `join_values` is for query [B, W, H, D]."""
    fits = query.is_cuda and query.dtype == latent.dtype == value_up.dtype == torch.bfloat16
    fits = fits and tuple(value_up.shape[1:]) == (RANK, VALUE) and latent.shape[2] > RANK
    return fits and 0 < query[..., 0, 0].numel() <= MOST_QUERIES and lacking() is None


def join_values(
    mixed: Tensor,  # float32 [N, parts, H, C]
    high: Tensor,  # float32 [N, parts, H]
    total: Tensor,  # float32 [N, parts, H]
    value_up: Tensor,  # bfloat16 [H, C, V]
    out: Tensor,  # bfloat16 [N, H * V], contiguous
) -> None:
    """Runs as `runs.join` takes them, into what `expand_values` gives of what they are joined to.

    At most `MOST_PARTS` parts.
    """
    (count, parts, heads), tokens = high.shape, FEW if len(high) <= FEW else TOKENS
    space = 4 * tokens * (VALUE + parts) + 2 * tokens * (RANK // CLUSTER + 8)
    KERNEL.launch(
        triton.cdiv(count, tokens) * heads * CLUSTER, THREADS, space,
        mixed, high, total, value_up, out, count, RANK=RANK, VALUE=VALUE, HEADS=heads, PARTS=parts,
        TOKENS=tokens,
    )  # fmt: skip


@implement("sparse_mla_values", "cuda")
def sparse_mla_values(
    query: Tensor,
    latent: Tensor,
    slots: Tensor,
    scale: float,
    value_up: Tensor,
    page_table: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    if not serves(query, latent, value_up):
        return values_apart(query, latent, slots, scale, value_up, page_table, rows)
    heads, rank, value = value_up.shape
    mixture = query.new_empty((*query.shape[:3], rank))
    out = query.new_empty((*query.shape[:2], heads * value))
    lines = out.flatten(0, 1)

    def close(mixed: Tensor, high: Tensor, total: Tensor, piece: slice) -> None:
        join_values(mixed, high, total, value_up, lines[piece])

    attend, given, tile = runs_of(query, latent, scale, rank)
    parts = attend_by_runs(attend, given, query, slots, mixture, tile, False, close)
    return out if parts > 1 else expand_values(mixture, value_up)
