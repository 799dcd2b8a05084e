# SPDX-License-Identifier: Apache-2.0
"""Reads of packed caches that dequantise each distinct row once, and no page that is not live.

What they read becomes a small plain cache, with slots and pages of its own, for the CPU body of the
op over plain rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

import freewheel.ops.packed_keys  # noqa: F401 - declares what this file implements
from freewheel.ops.cpu.attention import index_logits, sparse_mla
from freewheel.ops.cpu.compressed import rope_tail
from freewheel.ops.cpu.latents import absorb_query
from freewheel.ops.cpu.sinks import sink_attention
from freewheel.ops.dense import wide
from freewheel.ops.packed import rounded_query
from freewheel.ops.registry import SPECIFICATIONS, implement
from freewheel.ops.rows import read_index_pages, read_keys, read_latents


@implement("fp8_place_queries", "cpu")
def fp8_place_queries(
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
    queries, gates = SPECIFICATIONS["fp8_index_queries"](
        cache, query, gates, gate_scale, key, norm_weight, norm_bias, eps, positions, rope_table,
        interleaved, slots,
    )  # fmt: skip
    return queries, gates, absorb_query(own, key_up, positions, rope_table, own_interleaved)


def _distinct(slots: Tensor) -> tuple[Tensor, Tensor]:
    """(int32 [U] the slots named, int32 like slots: which of them, or -1 as before)."""
    distinct, lane = slots.unique(return_inverse=True)  # ascending, so -1 is the first if any
    dead = int((distinct < 0).sum())
    return distinct[dead:], (lane - dead).clamp(min=-1).int()


@implement("fp8_sparse_mla", "cpu")
def fp8_sparse_mla(
    query: Tensor, latent: Tensor, slots: Tensor, scale: float, value_dim: int, fixed: bool = False
) -> Tensor:
    del fixed  # a query is one piece always
    named, own = _distinct(slots)
    keys = read_latents(latent, named, value_dim, wide(query).dtype)[None]
    if not keys.numel():
        return query.new_zeros((*query.shape[:3], value_dim))
    return sparse_mla(query, keys, own, scale, value_dim)


@implement("fp8_index_logits", "cpu")
def fp8_index_logits(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    skip: int = 0,
) -> Tensor:
    del skip  # every key is scored
    page_size = index_keys.shape[1]
    columns = -(-max(kv_lens.flatten().tolist(), default=0) // page_size)
    pages = page_table.index_select(0, rows)[:, :columns]  # int32 [B, n]
    used = torch.arange(columns) * page_size < kv_lens.amax(1, keepdim=True)  # bool [B, n]
    live = pages[used]  # int32 [L]
    table = torch.zeros_like(pages)
    table[used] = torch.arange(live.shape[0], dtype=torch.int32)
    keys = read_index_pages(index_keys, live, head_weights.dtype)
    own = torch.arange(rows.shape[0], dtype=torch.int32)
    query = rounded_query(query, head_weights.dtype)
    logits = index_logits(query, head_weights, keys, table, own, kv_lens)
    beyond = (page_table.shape[1] - columns) * page_size
    return torch.nn.functional.pad(logits, (0, beyond), value=float("-inf"))


@implement("fp8_window_attention", "cpu")
def fp8_window_attention(
    query: Tensor,
    keys: Tensor,
    slots: Tensor,
    entries: Tensor,
    entry_slots: Tensor,
    sinks: Tensor,
    scale: float,
    positions: Tensor,
    rope_table: Tensor,
    fixed: bool = False,
) -> Tensor:
    del fixed  # a query is one piece always
    dim, rope, dtype = query.shape[3], rope_table.shape[1], wide(query).dtype
    pairs = ((keys, slots), (entries, entry_slots))
    (own, lanes), (more, picks) = (_plain(cache, at, dim, rope, dtype) for cache, at in pairs)
    mixed = sink_attention(query, own, lanes, more, picks, sinks, scale)
    return rope_tail(mixed, positions, rope_table, True)


def _plain(
    cache: Tensor, slots: Tensor, dim: int, rope: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(dtype [1, U, D] of the packed keys named, int32 like slots: which of them)."""
    named, own = _distinct(slots)
    return read_keys(cache, named, dim, rope, dtype)[None], own
