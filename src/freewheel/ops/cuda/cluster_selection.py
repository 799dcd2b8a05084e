# SPDX-License-Identifier: Apache-2.0
"""Top-k by the blocks of one cluster a row, in one launch: `sources/topk_slots.cu`."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from freewheel.ops.cuda.native import SHARED, Kernel

KERNEL = Kernel("topk_slots", "pppppiiiii")

FIXED = 50_368
"""Bytes of shared memory before the list of what is kept, which keys and pages follow."""

FEW_ROWS = 16

SCORES, SCORES_OF_FEW_ROWS, MOST_SCORES = 4096, 2048, 32_768
"""Scores of a block: for fewer it would only wait; with more than the last, others should help."""

BLOCKS = 8
"""Blocks of a cluster, at most: what every device with clusters can do."""


@cache
def _units(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_of(queries: int, length: int, units: int) -> tuple[int, int]:
    """(blocks of a row, threads of a block).

    Blocks: a power of two, as many as there are multiprocessors for, and scores to share. Three in
    place of four where every multiprocessor would have to have one: clusters lie within groups of
    16 to 18 multiprocessors, which some clusters of four would wait for.
    """
    each = SCORES_OF_FEW_ROWS if queries <= FEW_ROWS else SCORES
    useful = min(triton.cdiv(length, each), units // queries)
    needed = triton.cdiv(length, MOST_SCORES)
    blocks = 1
    while blocks < BLOCKS and (blocks * 2 <= useful or blocks < needed):
        blocks *= 2
    threads = 512 if triton.cdiv(length, blocks) <= 8192 else 1024
    crowded = threads == 1024 and 7 * units < 8 * blocks * queries <= 8 * units
    return 3 if crowded and blocks == 4 else blocks, threads


def select_by_cluster(
    logits: Tensor, page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> None:
    """Into `out`, int32 [B, W, k], as `topk_slots` gives it."""
    (batch, width, length), k = logits.shape, out.shape[2]
    queries = batch * width
    blocks, threads = plan_of(queries, length, _units(logits.device.index))
    part = triton.cdiv(triton.cdiv(length, blocks), 4) * 4
    fixed = FIXED + triton.cdiv(k, 4) * 16 + 4 * (triton.cdiv(part, page_size) + 1)
    held = min(part, (SHARED - fixed) // 16 * 4)
    vector = length % 4 == 0 and logits.data_ptr() % 16 == 0
    KERNEL.launch(
        queries * blocks, threads, fixed + 4 * held,
        logits, page_table, rows, kv_lens, out, width, length, page_table.stride(0), k, held,
        THREADS=threads, CLUSTER=blocks, PAGE=page_size, VECTOR=int(vector),
    )  # fmt: skip
