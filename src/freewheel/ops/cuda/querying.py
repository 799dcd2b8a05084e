# SPDX-License-Identifier: Apache-2.0
"""Queries of the indexer and of the attention in one launch: both are made of one projection.

Programs that absorb stand in front, since they take longest, and load their weights before they
wait.
"""

from __future__ import annotations

from typing import Any

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
def place_queries(cache: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not serves(args):
        return SPECIFICATIONS["place_queries"](cache, *args)
    block = triton.next_power_of_2(args[0].shape[3])
    return launch(_place_queries, (cache,), (), args, BLOCK=block)


def serves(args: tuple[Any, ...]) -> bool:
    """Whether the kernels are for what `place_queries` is given behind its cache."""
    query, own, key_up = args[0], args[11], args[12]
    return query.dtype == own.dtype == key_up.dtype != torch.float64


def launch(
    kernel: Any,
    cache: tuple[Tensor, ...],
    behind: tuple[int, ...],
    args: tuple[Any, ...],
    **constants: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernel` over what `place_queries` is given behind its cache, which it takes as `cache`.

    `behind`, `constants`: what this kernel takes besides, behind the strides and by name.
    """
    query, gates, gate_scale, key, weight, bias, eps, positions, table, interleaved = args[:10]
    slots, own, key_up, own_interleaved = args[10:]
    (heads, dim), (own_heads, nope, rank) = query.shape[2:], key_up.shape
    span, tokens = table.shape[1], slots.numel()
    turned = torch.empty_like(query, memory_format=torch.contiguous_format)
    scaled = torch.empty_like(gates, memory_format=torch.contiguous_format)
    absorbed = own.new_empty((*own.shape[:3], rank + span))
    if not tokens:
        return turned, scaled, absorbed
    (query, q_stride), (own, own_stride) = _rows_of_heads(query), _rows_of_heads(own)
    (gates, g_stride), (key, k_stride) = rows_of(gates), rows_of(key)
    block = max(16, min(64, triton.next_power_of_2(rank)))
    absorbing = own_heads * (1 + triton.cdiv(rank, block)) * triton.cdiv(tokens, TOKENS)
    kernel[(absorbing + tokens * (1 + triton.cdiv(heads, HEADS)),)](
        own, key_up, absorbed, own_stride, absorbing, *cache, query, turned, gates, scaled, key,
        weight, bias, positions.contiguous(), table, slots.contiguous(), eps, gate_scale, tokens,
        heads, q_stride, g_stride, k_stride, *behind,
        H=own_heads, NOPE=nope, RANK=rank, OWN_INTERLEAVED=own_interleaved, TOKENS=TOKENS,
        BLOCK_N=max(16, triton.next_power_of_2(nope)), BLOCK_C=block, DIM=dim, SPAN=span,
        INTERLEAVED=interleaved, HEADS=HEADS, HALF=triton.next_power_of_2(span // 2),
        CHAINED=CHAINED, num_warps=4, launch_pdl=CHAINED, **constants,
    )  # fmt: skip
    return turned, scaled, absorbed


def _rows_of_heads(x: Tensor) -> tuple[Tensor, int]:
    """x [B, W, H, D] whose heads lie side by side, and the elements from one token to the next."""
    return rows_of(x if x.stride(2) == x.shape[3] else x.contiguous())
