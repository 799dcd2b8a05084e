# SPDX-License-Identifier: Apache-2.0
"""FP8 experts of up to four tokens in CUDA C++, in one launch: `sources/joined_experts.cu`.

Its blocks wait for one another, one on each multiprocessor. So two launches must not run side by
side: rounds of a device are on one stream.

Error: weights are exact. A token is the sum of two numbers of e4m3, which is exact for what is not
2^14 times smaller than its largest input. Matrix units add products of e4m3 with fewer bits than
float32 has (decision 25), 128 inputs at a time; their sums are added in float32. What lies between
the two projections is rounded once to bfloat16, and so is the sum over experts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from freewheel.ops.cuda.few_block_experts import BlockWeights, shared_parts
from freewheel.ops.cuda.native import SHARED, Boxes, Kernel, lacking

KERNEL = Kernel("joined_experts", "pppppppppmmmmfii", "a")

MOST_TOKENS, MOST_PAIRS, MOST_CHOICES = 4, 32, 8
"""Columns of a product come in pairs, and a warp lists pairs of token and choice, one in a lane."""

MOST_WIDTH, MOST_HIDDEN = 512, 8192
"""Of an expert: what shared memory and two scales in a lane hold."""

MOST_PARTS = 8
"""Of the shared expert, as wide as the others."""

STEP = 256
"""Inputs of a stage of the ring, of 64 rows."""

ROWS, BOX = 64, 128
"""Of what the driver brings at once; and its inputs."""

SPOTS, WARPS = 4, 9
"""Tiles of tokens between the halves, and all that a block consists of."""

STAGES = 8
"""Of the ring, at most: more leave no room for the next kernel, which then begins later."""

TABLE = 3072
"""Bytes for barriers and the list of experts, and to begin at a multiple of 1024."""


class Weights(NamedTuple):
    """Of experts [E, 2I, H] and [E, H, I]: boxes of gates and ups in turn, and of outputs."""

    gate_up: Boxes
    down: Boxes


def boxes_of(gate_up: Tensor, down: Tensor) -> Weights:
    """gate_up uint8 [E, 2I, H] and down [E, H, I], or those of one expert; contiguous."""
    hidden, width = down.shape[-2:]
    experts = down.numel() // (hidden * width)
    up = Boxes(
        gate_up.data_ptr(), (hidden, 8, 2, width // 8, experts),
        (1, hidden, width * hidden, 8 * hidden, 2 * width * hidden), (BOX, 8, 2, 4, 1),
    )  # fmt: skip
    low = Boxes(
        down.data_ptr(), (width, hidden, experts, 1, 1),
        (1, width, hidden * width, down.numel(), down.numel()), (BOX, ROWS, 1, 1, 1),
    )  # fmt: skip
    return Weights(up, low)


@cache
def processors(device: int) -> int:
    """Multiprocessors of a device, so blocks of a launch."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits(x: Tensor, own: BlockWeights, shared: BlockWeights | None) -> bool:
    """Whether experts of such sizes run in one launch on x [..., H], on this device."""
    _, hidden, width = own.down.shape
    if x.dtype != torch.bfloat16 or lacking() is not None:
        return False
    if width % STEP or width > MOST_WIDTH or hidden % (2 * STEP) or hidden > MOST_HIDDEN:
        return False
    if hidden // ROWS > processors(x.device.index):
        return False
    behind = shared or own
    read = (x, own.gate_up, own.down, behind.gate_up, behind.down)
    if any(t.data_ptr() % 16 for t in read):
        return False
    parts = shared_parts(width, None if shared is None else shared.down.shape[-1])
    return parts is not None and parts <= MOST_PARTS


def takes(x: Tensor, own: BlockWeights, ids: Tensor, shared: BlockWeights | None) -> bool:
    """Whether `joined_experts` computes these experts on x [..., H]."""
    pairs, choices = ids.numel(), ids.shape[-1]
    few = 0 < pairs <= MOST_TOKENS * choices and choices <= MOST_CHOICES
    return few and fits(x, own, shared)


def shared_bytes(stages: int, hidden: int, width: int) -> int:
    """Shared memory of a block."""
    return stages * ROWS * STEP + 2 * MOST_TOKENS * (hidden + SPOTS * width) + TABLE


def joined_experts(
    x: Tensor,
    own: BlockWeights,
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
    shared: BlockWeights | None,
) -> Tensor:
    """`block_experts` of what it `takes`; x, ids and weights are contiguous."""
    (_, hidden, width), top_k, pairs = own.down.shape, ids.shape[-1], ids.numel()
    extra, behind = 0 if shared is None else shared.down.shape[-1] // width, shared or own
    out = torch.empty_like(x)
    inner = x.new_empty(((pairs + extra) * (pairs // top_k), width))
    routed, common = boxes_of(own.gate_up, own.down), boxes_of(behind.gate_up, behind.down)
    stages = min(STAGES, (SHARED - shared_bytes(0, hidden, width)) // (ROWS * STEP))
    blocks = processors(x.device.index)
    KERNEL.launch(
        blocks, 32 * WARPS, shared_bytes(stages, hidden, width),
        x, own.gate_up_scale, own.down_scale, behind.gate_up_scale, behind.down_scale, ids,
        weights.to(torch.float32), inner, out, routed.gate_up, routed.down, common.gate_up,
        common.down, 0.0 if limit is None else limit, pairs, blocks,
        TOP_K=top_k, HIDDEN=hidden, WIDTH=width, EXTRA=extra, STAGES=stages,
        CLAMP=int(limit is not None),
    )  # fmt: skip
    return out
