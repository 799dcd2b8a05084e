# SPDX-License-Identifier: Apache-2.0
"""Top-k of rows that one block holds in its registers, in one launch: `sources/topk_short.cu`."""

from __future__ import annotations

import triton
from torch import Tensor

from freewheel.ops.cuda.native import Kernel

KERNEL = Kernel("topk_short", "pppppiiii")

MOST_SCORES = 8192
"""Of a row; longer ones are for several blocks."""

MOST_QUERIES = 64
"""It is faster for more of them too, alone; that a round is faster with it was only seen so far."""

FEWEST_THREADS, THREADS = 128, 1024


def is_short(queries: int, length: int, page_size: int) -> bool:
    """Whether so many rows of so many scores are for this kernel."""
    return queries <= MOST_QUERIES and length <= MOST_SCORES and page_size % 4 == 0


def plan_of(length: int) -> tuple[int, int]:
    """(threads of a block, scores of each in fours).

    As few of these as there can be, and no more threads than they need.
    """
    fours = triton.cdiv(length, 4 * THREADS)
    return max(FEWEST_THREADS, triton.cdiv(length, 128 * fours) * 32), fours


def shared_of(threads: int, fours: int, k: int) -> int:
    """Bytes of shared memory of a block."""
    words = 4096 + threads + 32 + 32 * fours + threads // 4 + 3
    return triton.cdiv(words, 4) * 16 + 4 * k


def select_short(
    logits: Tensor, page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> None:
    """Into `out`, int32 [B, W, k], as `topk_slots` gives it."""
    (batch, width, length), k = logits.shape, out.shape[2]
    threads, fours = plan_of(length)
    vector = length % 4 == 0 and logits.data_ptr() % 16 == 0
    KERNEL.launch(
        batch * width, threads, shared_of(threads, fours, k),
        logits, page_table, rows, kv_lens, out, width, length, page_table.stride(0), k,
        THREADS=threads, FOURS=fours, PAGE=page_size, VECTOR=int(vector),
    )  # fmt: skip
