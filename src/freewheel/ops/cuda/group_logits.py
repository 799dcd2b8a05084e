# SPDX-License-Identifier: Apache-2.0
"""Index logits by warp groups, keys read once for up to eight queries: `sources/index_logits.cu`.

For Hopper's matrix instructions, keys of 128 values in bfloat16 or FP8, and 32 or 64 heads.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from freewheel.ops.cuda.native import Kernel, lacking

KERNEL = Kernel("index_logits", "pppppppiiiiiiiiiii", chip="a")

DIM, KEYS = 128, 64
HEADS = (32, 64)

LONG = 16_384
"""Keys in bfloat16 from which it is faster than Triton's kernel, which begins sooner."""

MOST_QUERIES = 8
"""Queries of a block: their heads stay in shared memory."""

PLANS = {
    True: ((1, 4, 4), (1, 4, 3)),
    False: ((1, 4, 3), (1, 4, 2), (1, 2, 2)),
}
"""For packed keys and for others, the first that fits counts: blocks of a multiprocessor, warp
groups of a block, and stages of each."""

ALL_SHARED = 230_000
"""Bytes of shared memory that the blocks of one multiprocessor may have between them."""


@cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _units(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_served(query: Tensor, gates: Tensor, keys: Tensor, length: int, packed: bool) -> bool:
    """Whether the kernel is for these tensors and this machine.

    `length`: keys that a row has room for; `packed`: they are FP8.
    """
    heads, dim = query.shape[2:]
    fits = heads in HEADS and dim == DIM and keys.shape[1] % KEYS == 0
    kinds = query.dtype == torch.bfloat16 and gates.dtype == torch.float32
    kinds = kinds and (packed or (keys.dtype == torch.bfloat16 and length >= LONG))
    there = query.is_cuda and lacking() is None and _is_hopper(query.device.index)
    return fits and kinds and there


class Plan(NamedTuple):
    """As `sources/index_logits.cu` names them. `shared`: bytes of shared memory of a block."""

    joined: int
    buffers: int
    blocks: int
    groups: int
    stages: int
    shared: int


def plan_of(queries: int, heads: int, packed: bool) -> Plan:
    row = DIM if packed else 2 * DIM
    stage = KEYS * row + (4 * KEYS if packed else 0) + 8
    joined = 1 + (queries % 2 == 0)
    buffers = 2 if joined * heads < 128 else 1  # registers for 128 heads twice there are not
    for blocks, groups, stages in PLANS[packed]:
        shared = queries * heads * (row + 4) + groups * stages * stage
        if blocks * shared <= ALL_SHARED:
            return Plan(joined, buffers, blocks, groups, stages, shared)
    raise AssertionError(f"{queries} queries of {heads} heads do not fit")


def logits_by_groups(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    skip: int,
) -> Tensor:
    """As `index_logits`, or `fp8_index_logits` where keys are uint8."""
    (batch, width, heads, _), page_size = query.shape, index_keys.shape[1]
    packed = index_keys.dtype == torch.uint8
    aligned = query.stride(-1) == 1 and all(stride % 8 == 0 for stride in query.stride()[:3])
    query = query if aligned and query.data_ptr() % 16 == 0 else query.clone().contiguous()
    gates = head_weights if head_weights.stride(-1) == 1 else head_weights.contiguous()
    length = page_table.shape[1] * page_size
    out = gates.new_empty((batch, width, length))
    if not out.numel():
        return out
    parts = triton.cdiv(width, MOST_QUERIES)
    queries = triton.cdiv(width, parts)
    plan = plan_of(queries, heads, packed)
    share = max(1, _units(query.device.index) * plan.blocks // (batch * parts))
    share = min(share, triton.cdiv(length, KEYS * plan.groups))
    KERNEL.launch(
        batch * parts * share, 128 * plan.groups, plan.shared,
        query, gates, index_keys, page_table, rows, kv_lens.contiguous(), out,
        width, parts, share, page_table.stride(0), length, skip,
        *query.stride()[:3], *gates.stride()[:2],
        FP8=int(packed), HEADS=heads, QUERIES=queries, JOINED=plan.joined, BUFFERS=plan.buffers,
        GROUPS=plan.groups, STAGES=plan.stages, BLOCKS=plan.blocks, PAGE=page_size,
    )  # fmt: skip
    return out
