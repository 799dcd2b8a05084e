# SPDX-License-Identifier: Apache-2.0
"""FP8 experts: few tokens by pairs of token and choice, more by tiles of each expert's own tokens.

Up to four on Hopper in CUDA C++, in one launch, if sizes allow it; else in Triton, in three
launches or four.

Error: projections as in `joined_experts` or `quantised`; what lies between the two is rounded once
to the tokens' dtype, and so is the sum over experts. Of more than 64 tokens so is what each expert
gives, which adds 2^-9 of the sum of its magnitudes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.clamped import clamped_silu_mul
from freewheel.ops.cuda.few_block_experts import BlockWeights, few_block_experts, takes
from freewheel.ops.cuda.joined_experts import joined_experts
from freewheel.ops.cuda.joined_experts import takes as takes_joined
from freewheel.ops.cuda.quantised import block_linear, uses_matrix_units
from freewheel.ops.cuda.quantised_experts import (
    STEP,
    shape_for,
    takes_shared,
    tiled_block_experts,
)
from freewheel.ops.dense import silu_mul
from freewheel.ops.registry import SPECIFICATIONS, implement


@implement("block_experts", "cuda")
def block_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    fixed: bool = False,
) -> Tensor:
    shared = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    if x.dtype not in (torch.bfloat16, torch.float32):
        given = (x, gate_up, gate_up_scale, down, down_scale, ids, weights, limit)
        return SPECIFICATIONS["block_experts"](*given, *shared)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    own, behind = as_bytes(gate_up, gate_up_scale, down, down_scale), as_bytes(*shared)
    assert own is not None
    width = None if behind is None else behind.down.shape[1]
    if not fixed and takes_joined(x, own, ids, behind):
        return joined_experts(x, own, ids, weights, limit, behind)
    if not fixed and takes(ids.numel() // ids.shape[-1], down.shape[2], width):
        return few_block_experts(x, own, ids, weights, limit, behind, uses_matrix_units(x))
    fast, experts = uses_matrix_units(x), down.shape[0]
    shape = shape_for(ids.numel(), ids.shape[-1], experts, fast, fixed)
    if width is None or takes_shared(shape, down.shape[2], width):
        return tiled_block_experts(x, own, ids, weights, limit, behind, fast, shape)
    out = tiled_block_experts(x, own, ids, weights, limit, None, fast, shape)
    return out if behind is None else out + run_shared(x, behind, limit, fixed)


def as_bytes(
    gate_up: Tensor | None,
    gate_up_scale: Tensor | None,
    down: Tensor | None,
    down_scale: Tensor | None,
) -> BlockWeights | None:
    """FP8 weights as the bytes that kernels read, if there are any."""
    if gate_up is None or gate_up_scale is None or down is None or down_scale is None:
        return None
    return BlockWeights(
        gate_up.view(torch.uint8), gate_up_scale, down.view(torch.uint8), down_scale
    )


def run_shared(x: Tensor, shared: BlockWeights, limit: float | None, fixed: bool = False) -> Tensor:
    """x through an expert of any width that every token chooses: [..., H]."""
    if shared.down.shape[1] % STEP:  # the second half begins inside a block
        halves = zip(shared.gate_up.chunk(2), shared.gate_up_scale.chunk(2), strict=True)
        both = torch.cat([block_linear(x, w, s, fixed=fixed) for w, s in halves], -1)
    else:
        both = block_linear(x, shared.gate_up, shared.gate_up_scale, fixed=fixed)
    inner = silu_mul(both) if limit is None else clamped_silu_mul(both, limit)
    return block_linear(inner, shared.down, shared.down_scale, fixed=fixed)
