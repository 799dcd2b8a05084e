# SPDX-License-Identifier: Apache-2.0
"""FP8 projections of 17 to 128 tokens on Hopper, fed by rings in shared memory.

See `sources/ring_products.cu`. More tokens are left to `early_products`, which also stands in where
this kernel cannot run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from freewheel.ops.cuda.early_products import PROGRAMS
from freewheel.ops.cuda.early_products import serves as early_serves
from freewheel.ops.cuda.native import Boxes, Kernel, lacking

KERNEL = Kernel("ring_products", "mmppiiiiii", chip="a")

BLOCK = 128
"""Outputs of a block of threads, and inputs that a scale covers."""

ALIGNED = 16
"""Bytes: where copies may begin."""

MOST_TOKENS = 128
"""A block has all tokens."""

MOST_HELD_TOKENS = 64
"""From here on warps hand on registers, for which four more of them are launched."""


class RingTile(NamedTuple):
    """Tokens of a block, stages of tokens and of codes, blocks that share an output."""

    tokens: int
    stages: int
    codes: int
    parts: int

    @property
    def threads(self) -> int:
        return 384 if self.tokens > MOST_HELD_TOKENS else 288

    @property
    def shared(self) -> int:
        """Bytes: two barriers a stage, and room to begin at a multiple of 1,024."""
        tokens, codes = 2 * BLOCK * self.tokens + 16, BLOCK * BLOCK + 16
        return 1024 + self.stages * tokens + self.codes * codes


def ring_tile(tokens: int, outputs: int, inputs: int) -> RingTile:
    """By the weight's shape, but for a block's tokens and its stages."""
    tiles, blocks = triton.cdiv(outputs, BLOCK), triton.cdiv(inputs, BLOCK)
    parts = max(1, min(PROGRAMS // tiles, blocks // 4))
    if tokens <= 32:
        return RingTile(32, 4, 4, parts)
    if tokens <= 64:
        return RingTile(64, 3, 4, parts)
    return RingTile(128, 4, 5, parts)


def serves(x: Tensor, weight: Tensor, block_n: int, block_k: int) -> bool:
    """Whether this kernel is for such a projection."""
    outputs, inputs = weight.shape
    known = outputs % 4 == 0 and weight.data_ptr() % ALIGNED == 0
    few = x.numel() <= MOST_TOKENS * inputs
    return few and known and early_serves(x, inputs, block_n, block_k) and lacking() is None


def rows_of(matrix: Tensor, count: int) -> Boxes:
    """Boxes of `count` rows and 128 bytes of contiguous [R, C]."""
    (rows, columns), size = matrix.shape, matrix.element_size()
    width, whole = columns * size, matrix.numel() * size
    address = matrix.data_ptr()
    return Boxes(address, (width, rows, 1, 1, 1), (1, width, *3 * (whole,)), (128, count, 1, 1, 1))


def ring_products(
    x: Tensor, weight: Tensor, scale: Tensor, room: Tensor, block_n: int, share: int, tile: RingTile
) -> None:
    """Set `room` to x [tokens, K] times the transposed weight [N, K], in parts of `share` inputs.

    room: float32 [parts, tokens, N], or one part of bfloat16.
    """
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    parts = triton.cdiv(inputs, share)
    x = x if x.data_ptr() % ALIGNED == 0 else x.clone()
    blocks = triton.cdiv(outputs, BLOCK) * parts * triton.cdiv(tokens, tile.tokens)
    KERNEL.launch(
        blocks, tile.threads, tile.shared,
        rows_of(x, tile.tokens), rows_of(weight, BLOCK), scale, room,
        tokens, outputs, inputs // BLOCK, share // BLOCK, parts, block_n,
        TOKENS=tile.tokens, STAGES=tile.stages, CODES=tile.codes,
        WIDE=int(room.dtype == torch.float32), FP8=0,
    )  # fmt: skip
