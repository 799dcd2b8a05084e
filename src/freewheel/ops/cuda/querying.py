# SPDX-License-Identifier: Apache-2.0
"""Queries of the indexer and of the attention in one launch: both are made of one projection.

Programs that absorb stand in front, since they take longest, and load their weights before they
wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.latents import TOKENS, absorb_head, place_token, rows_of
from freewheel.ops.registry import SPECIFICATIONS, implement

HEADS = 16
"""Of the indexer, of one program."""


@triton.jit
def _place_queries(
    own, key_up, absorbed, own_stride, absorbing,
    cache, query, query_out, gates, gates_out, key, weight, bias, positions, table, slots, eps,
    gate_scale, count, INDEX_HEADS, query_stride, gate_stride, key_stride,
    H: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, OWN_INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DIM: tl.constexpr,
    SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, CHAINED: tl.constexpr,
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
        place_token(
            cache, query, query_out, gates, gates_out, key, weight, bias, positions, table, slots,
            eps, gate_scale, INDEX_HEADS, query_stride, gate_stride, key_stride,
            (program - absorbing) % count, (program - absorbing) // count,
            DIM, SPAN, INTERLEAVED, HEADS, BLOCK, HALF,
        )  # fmt: skip


@implement("place_queries", "cuda")
def place_queries(
    cache: Tensor,
    query: Tensor,
    gates: Tensor,
    gate_scale: float,
    key: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
    own: Tensor,
    key_up: Tensor,
    own_interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if own.dtype == torch.float64 or own.dtype != key_up.dtype or query.dtype != own.dtype:
        return SPECIFICATIONS["place_queries"](
            cache, query, gates, gate_scale, key, norm_weight, norm_bias, eps, positions,
            rope_table, interleaved, slots, own, key_up, own_interleaved,
        )  # fmt: skip
    (heads, dim), (own_heads, nope, rank) = query.shape[2:], key_up.shape
    span, tokens = rope_table.shape[1], slots.numel()
    turned = torch.empty_like(query, memory_format=torch.contiguous_format)
    scaled = torch.empty_like(gates, memory_format=torch.contiguous_format)
    absorbed = own.new_empty((*own.shape[:3], rank + span))
    if not tokens:
        return turned, scaled, absorbed
    (query, q_stride), (own, own_stride) = rows_of_heads(query), rows_of_heads(own)
    (gates, g_stride), (key, k_stride) = rows_of(gates), rows_of(key)
    block = max(16, min(64, triton.next_power_of_2(rank)))
    absorbing = own_heads * (1 + triton.cdiv(rank, block)) * triton.cdiv(tokens, TOKENS)
    _place_queries[(absorbing + tokens * (1 + triton.cdiv(heads, HEADS)),)](
        own, key_up, absorbed, own_stride, absorbing, cache, query, turned, gates, scaled, key,
        norm_weight, norm_bias, positions.contiguous(), rope_table, slots.contiguous(), eps,
        gate_scale, tokens, heads, q_stride, g_stride, k_stride,
        H=own_heads, NOPE=nope, RANK=rank, OWN_INTERLEAVED=own_interleaved, TOKENS=TOKENS,
        BLOCK_N=max(16, triton.next_power_of_2(nope)), BLOCK_C=block, DIM=dim, SPAN=span,
        INTERLEAVED=interleaved, HEADS=HEADS, BLOCK=triton.next_power_of_2(dim),
        HALF=triton.next_power_of_2(span // 2), CHAINED=CHAINED, num_warps=4, launch_pdl=CHAINED,
    )  # fmt: skip
    return turned, scaled, absorbed


def rows_of_heads(x: Tensor) -> tuple[Tensor, int]:
    """x [B, W, H, D] whose heads lie side by side, and the elements from one token to the next."""
    return rows_of(x if x.stride(2) == x.shape[3] else x.contiguous())
