# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens for queries that filter, by the blocks of one cluster a query.

See `sources/choose_tokens.cu`. Scores are read from memory once, whatever is filtered. Shares are
summed as whole numbers of 2^-32 of the likeliest token's: those below 2^-33 of it count nothing.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from freewheel.ops.cuda.native import SHARED, Kernel, lacking

KERNEL = Kernel("choose_tokens", "pppppppppppppiii")

THREADS = 512

TOKENS, BLOCKS = 4096, 8
"""Of a block, beyond which others help; of a query, at most: what every cluster can have."""

FIXED = 33_568
"""Bytes of shared memory in front of the scores."""


def blocks_for(vocabulary: int) -> int:
    """Of a query: a power of two."""
    blocks = 1
    while blocks < BLOCKS and vocabulary > blocks * TOKENS:
        blocks *= 2
    return blocks


def shared_bytes(vocabulary: int, blocks: int) -> int:
    """Of a block: its part of the vocabulary is a multiple of four."""
    return FIXED + 16 * triton.cdiv(triton.cdiv(vocabulary, blocks), 4)


def serves(logits: Tensor) -> bool:
    """Whether it chooses from float32 logits [B, C, V]."""
    vocabulary = logits.shape[-1]
    fits = shared_bytes(vocabulary, blocks_for(vocabulary)) <= SHARED
    return logits.is_cuda and fits and lacking() is None


def choose_by_cluster(
    logits: Tensor,
    positions: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    stop_ids: Tensor,
    minimum_lens: Tensor,
    values: Tensor,
    tokens: Tensor,
) -> Tensor:
    """`choose` of contiguous logits and positions, not empty.

    values float32, tokens int32 [queries, parts]: the best of each part of the vocabulary, noise
    included, NaN where a part holds one; read for queries that do not filter.
    """
    choices, vocabulary = logits.shape[1:]
    blocks = blocks_for(vocabulary)
    out = torch.empty(logits.shape[:2], dtype=torch.int32, device=logits.device)
    vector = vocabulary % 4 == 0 and logits.data_ptr() % 16 == 0
    KERNEL.launch(
        out.numel() * blocks, THREADS, shared_bytes(vocabulary, blocks),
        logits, positions, rows, temperature, top_k, top_p, min_p, seeds, stop_ids, minimum_lens,
        values, tokens, out, choices, vocabulary, values.shape[1],
        THREADS=THREADS, CLUSTER=blocks, STOPS=stop_ids.shape[1], VECTOR=int(vector),
    )  # fmt: skip
    return out
