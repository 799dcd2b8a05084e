# SPDX-License-Identifier: Apache-2.0
"""As `querying`, with the index key packed."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import follow
from freewheel.ops.cuda.latents import absorb_head
from freewheel.ops.cuda.packed import pack_token
from freewheel.ops.cuda.packing import views
from freewheel.ops.cuda.querying import launch, serves
from freewheel.ops.registry import SPECIFICATIONS, implement


@triton.jit
def _place_queries(
    own, key_up, absorbed, own_stride, absorbing,
    codes, scales, query, query_out, gates, gates_out, key, weight, bias, positions, table, slots,
    eps, gate_scale, count, INDEX_HEADS, query_stride, gate_stride, key_stride, page_rows,
    H: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, OWN_INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DIM: tl.constexpr,
    SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < absorbing:
        parts: tl.constexpr = 1 + (RANK + BLOCK_C - 1) // BLOCK_C
        rest = program // H
        absorb_head(
            own, key_up, positions, table, absorbed, count, own_stride,
            program % H, rest % parts, rest // parts,
            H, NOPE, SPAN, RANK, OWN_INTERLEAVED, TOKENS, BLOCK_N, BLOCK_C, HALF, CHAINED,
        )  # fmt: skip
    else:
        follow(CHAINED)
        pack_token(
            codes, scales, query, query_out, gates, gates_out, key, weight, bias, positions, table,
            slots, eps, gate_scale, INDEX_HEADS, query_stride, gate_stride, key_stride, page_rows,
            (program - absorbing) % count, (program - absorbing) // count,
            DIM, SPAN, INTERLEAVED, HEADS, HALF,
        )  # fmt: skip


@implement("fp8_place_queries", "cuda")
def fp8_place_queries(cache: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not serves(args):
        return SPECIFICATIONS["fp8_place_queries"](cache, *args)
    codes, _, scales = views(cache)
    return launch(_place_queries, (codes, scales), (cache.shape[1],), args)
