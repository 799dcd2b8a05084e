# SPDX-License-Identifier: Apache-2.0
"""Index logits over packed keys, their sums by matrix units: `sources/packed_logits.cu`.

For what `group_logits.is_served` says.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from freewheel.ops.cuda.group_logits import (
    DIM,
    KEYS,
    MOST_QUERIES,
    aligned,
    units_of,
)
from freewheel.ops.cuda.native import Kernel

KERNEL = Kernel("packed_logits", "pppppppiiiiiiiiiii", chip="a")

GROUPS = {32: 4, 64: 4, 128: 3, 192: 2, 256: 2}
"""Heads of all queries of a warp group, the columns of one product -> warp groups of a block, for
whose sums there are registers."""

STAGES = {4: 4, 3: 8, 2: 8}
"""Warp groups of a block -> blocks of keys under way for each."""

STAGE = KEYS * (DIM + 4)
"""Bytes of a block of keys and their scales."""


class Plan(NamedTuple):
    """As `sources/packed_logits.cu` names them. `shared`: bytes of shared memory of a block."""

    joined: int
    split: int
    groups: int
    stages: int
    shared: int


def plan_of(queries: int, heads: int) -> Plan:
    """For `queries` of `heads` each, MOST_QUERIES at most."""
    split = 1 if queries * heads <= max(GROUPS) else 2
    needed = triton.cdiv(queries, split) * heads
    columns = min(n for n in GROUPS if n >= needed and n % heads == 0)
    groups = 2 if split == 2 else GROUPS[columns]
    shared = split * columns * (DIM + 4) + groups * STAGES[groups] * (STAGE + 8)
    return Plan(columns // heads, split, groups, STAGES[groups], shared)


def logits_of_packed(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    skip: int,
) -> Tensor:
    """As `fp8_index_logits`."""
    (batch, width, heads, _), page_size = query.shape, index_keys.shape[1]
    query = aligned(query)
    gates = head_weights if head_weights.stride(-1) == 1 else head_weights.contiguous()
    length = page_table.shape[1] * page_size
    out = gates.new_empty((batch, width, length))
    if not out.numel():
        return out
    parts = triton.cdiv(width, MOST_QUERIES)
    plan = plan_of(triton.cdiv(width, parts), heads)
    share = max(1, units_of(query.device.index) // (batch * parts))
    share = min(share, triton.cdiv(length * plan.split, KEYS * plan.groups))
    KERNEL.launch(
        batch * parts * share, 128 * plan.groups, plan.shared,
        query, gates, index_keys, page_table, rows, kv_lens.contiguous(), out,
        width, parts, share, page_table.stride(0), length, skip,
        *query.stride()[:3], *gates.stride()[:2],
        FP8=1, HEADS=heads, JOINED=plan.joined, SPLIT=plan.split, GROUPS=plan.groups,
        STAGES=plan.stages, PAGE=page_size,
    )  # fmt: skip
    return out
