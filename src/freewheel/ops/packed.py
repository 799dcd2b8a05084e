# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over packed caches of latents and index keys: quantised once, at the store.

Each op is the one of the same name without `fp8_`, over rows as `spec.rows` describes them. A
store computes its row in wide numbers and rounds it once, to FP8; a read gives back the numbers
that the bytes stand for, and everything behind it is the other op. What no lane names is not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freewheel.ops.attention import GATHER_LIMIT, live_pages
from freewheel.ops.cache import index_key_rows, latent_rows
from freewheel.ops.dense import wide
from freewheel.ops.registry import SPECIFICATIONS, op
from freewheel.ops.rows import (
    dequantise_tiles,
    quantise_tiles,
    read_index_pages,
    read_latents,
    write_index_keys,
    write_latents,
)


@op(
    "fp8_norm_latents(Tensor(a!) cache, Tensor query, Tensor query_weight, Tensor compressed, "
    "Tensor latent_weight, float eps, Tensor positions, Tensor rope_table, bool interleaved, "
    "Tensor slots) -> Tensor",
    fake=lambda _, query, *__: torch.empty_like(query, memory_format=torch.contiguous_format),
)
def fp8_norm_latents(
    cache: Tensor,  # uint8 [n_pages, page_size, bytes]
    query: Tensor,  # [B, W, Q]  output of q_a_proj
    query_weight: Tensor,  # [Q]
    compressed: Tensor,  # [B, W, C + Dr]  output of kv_a_proj_with_mqa
    latent_weight: Tensor,  # [C]
    eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    interleaved: bool,
    slots: Tensor,  # int64 [B, W]
) -> Tensor:  # [B, W, Q]
    """The queries' latent, normed; that of the keys is stored: `norm_latents`."""
    rows = latent_rows(compressed, latent_weight, eps, positions, rope_table, interleaved)
    write_latents(cache, rows, slots, rope_table.shape[1])
    return SPECIFICATIONS["rms_norm"](query, query_weight, eps)


def _fake_sparse_mla(
    query: Tensor, latent: Tensor, slots: Tensor, scale: float, value_dim: int, fixed: bool = False
) -> Tensor:
    return query.new_empty((*query.shape[:3], value_dim))


@op(
    "fp8_sparse_mla(Tensor query, Tensor latent, Tensor slots, float scale, int value_dim, "
    "bool fixed=False) -> Tensor",
    fake=_fake_sparse_mla,
)
def fp8_sparse_mla(
    query: Tensor,  # [B, W, H, D]
    latent: Tensor,  # uint8 [n_pages, page_size, bytes]
    slots: Tensor,  # int32 [B, W, K]  negative: no key
    scale: float,
    value_dim: int,
    fixed: bool = False,
) -> Tensor:  # [B, W, H, value_dim]
    """`sparse_mla` over the numbers that the rows stand for; all of `value_dim` is in FP8."""
    queries, lanes = query.flatten(0, 1)[None], slots.flatten(0, 1)[None]  # [1, N, H, D], [1, N, K]
    step = max(1, GATHER_LIMIT // (lanes.shape[2] * query.shape[3]))
    pieces = zip(queries.split(step, 1), lanes.split(step, 1), strict=True)
    return torch.cat([_attend(q, latent, own, scale, value_dim) for q, own in pieces], 1).view(
        *query.shape[:3], value_dim
    )


def _attend(query: Tensor, latent: Tensor, slots: Tensor, scale: float, value_dim: int) -> Tensor:
    """query [1, n, H, D], slots [1, n, K] -> [1, n, H, value_dim]"""
    keys = read_latents(latent, slots.clamp(min=0).flatten(), value_dim, wide(query).dtype)
    keys, own = keys[None], renumbered(slots)
    return SPECIFICATIONS["sparse_mla"](query, keys, own, scale, value_dim)


def renumbered(slots: Tensor) -> Tensor:
    """int32 [...]: 0, 1, .. for slots [...] in their order; -1 where they are negative."""
    order = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device).view_as(slots)
    return order.masked_fill(slots < 0, -1)


def _fake_index_queries(
    cache: Tensor, query: Tensor, gates: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    del cache
    query = torch.empty_like(query, memory_format=torch.contiguous_format)
    return query, torch.empty_like(gates, memory_format=torch.contiguous_format)


@op(
    "fp8_index_queries(Tensor(a!) cache, Tensor query, Tensor gates, float gate_scale, "
    "Tensor key, Tensor norm_weight, Tensor norm_bias, float eps, Tensor positions, "
    "Tensor rope_table, bool interleaved, Tensor slots) -> (Tensor, Tensor)",
    fake=_fake_index_queries,
)
def fp8_index_queries(
    cache: Tensor,  # uint8 [n_pages, page_size, bytes]
    query: Tensor,  # [B, W, Hi, Di]  output of the indexer's wq_b
    gates: Tensor,  # float [B, W, Hi]  output of weights_proj
    gate_scale: float,
    key: Tensor,  # [B, W, Di]  output of the indexer's wk
    norm_weight: Tensor,  # [Di]
    norm_bias: Tensor,  # [Di]
    eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    interleaved: bool,
    slots: Tensor,  # int64 [B, W]
) -> tuple[Tensor, Tensor]:  # [B, W, Hi, Di], float [B, W, Hi]
    """The indexer's queries, rotated, and its gates, scaled; its key is stored: `index_queries`."""
    rows = index_key_rows(key, norm_weight, norm_bias, eps, positions, rope_table, interleaved)
    write_index_keys(cache, rows, slots)
    turned = SPECIFICATIONS["rope"](query, positions, rope_table, 0, interleaved)
    return turned, gates * gate_scale


def _fake_place_queries(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    own, key_up, table = args[12], args[13], args[9]
    absorbed = own.new_empty((*own.shape[:3], key_up.shape[2] + table.shape[1]))
    return *_fake_index_queries(*args[:3]), absorbed


@op(
    "fp8_place_queries(Tensor(a!) cache, Tensor query, Tensor gates, float gate_scale, "
    "Tensor key, Tensor norm_weight, Tensor norm_bias, float eps, Tensor positions, "
    "Tensor rope_table, bool interleaved, Tensor slots, Tensor own, Tensor key_up, "
    "bool own_interleaved) -> (Tensor, Tensor, Tensor)",
    fake=_fake_place_queries,
)
def fp8_place_queries(
    cache: Tensor,  # uint8 [n_pages, page_size, bytes]
    query: Tensor,  # [B, W, Hi, Di]  output of the indexer's wq_b
    gates: Tensor,  # float [B, W, Hi]  output of weights_proj
    gate_scale: float,
    key: Tensor,  # [B, W, Di]  output of the indexer's wk
    norm_weight: Tensor,  # [Di]
    norm_bias: Tensor,  # [Di]
    eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    interleaved: bool,
    slots: Tensor,  # int64 [B, W]
    own: Tensor,  # [B, W, H, N + Dr]  output of q_b_proj
    key_up: Tensor,  # [H, N, C]
    own_interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, W, Hi, Di], float [B, W, Hi], [B, W, H, C + Dr]
    """`fp8_index_queries`, and `absorb_query` of `own`."""
    queries, gates = SPECIFICATIONS["fp8_index_queries"](
        cache, query, gates, gate_scale, key, norm_weight, norm_bias, eps, positions, rope_table,
        interleaved, slots,
    )  # fmt: skip
    absorb = SPECIFICATIONS["absorb_query"]
    return queries, gates, absorb(own, key_up, positions, rope_table, own_interleaved)


def _fake_index_logits(
    query: Tensor, head_weights: Tensor, index_keys: Tensor, page_table: Tensor, *_: object
) -> Tensor:
    return head_weights.new_empty((*query.shape[:2], page_table.shape[1] * index_keys.shape[1]))


@op(
    "fp8_index_logits(Tensor query, Tensor head_weights, Tensor index_keys, Tensor page_table, "
    "Tensor rows, Tensor kv_lens, int skip=0) -> Tensor",
    fake=_fake_index_logits,
)
def fp8_index_logits(
    query: Tensor,  # [B, W, Hi, Di]
    head_weights: Tensor,  # float [B, W, Hi]  all scales folded in
    index_keys: Tensor,  # uint8 [n_pages, page_size, bytes]
    page_table: Tensor,  # int32 [R, P]
    rows: Tensor,  # int32 [B]
    kv_lens: Tensor,  # int32 [B, W]
    skip: int = 0,
) -> Tensor:  # float [B, W, P * page_size]
    """`index_logits` of queries rounded to FP8 over the numbers that the rows stand for.

    A head of a query is rounded as a key is when it is stored, with one scale: so both sides of
    the product are FP8, as in the model's own inference code (DeepSeek-V3.2, arXiv:2512.02556,
    2.1), and their scales stay outside of it.

    Error: against float64 on the same inputs a body stays within 2e-5 of the largest logit from
    float32; from bfloat16 within 2^-6, of which matrix units that add FP8 products use 2^-10.
    """
    pages = live_pages(page_table, rows, kv_lens, index_keys.shape[1])  # int32 [B, P]
    keys = read_index_pages(index_keys, pages.flatten(), head_weights.dtype)
    table = torch.arange(pages.numel(), dtype=torch.int32, device=rows.device).view_as(pages)
    own = torch.arange(pages.shape[0], dtype=torch.int32, device=rows.device)
    query = rounded_query(query, head_weights.dtype)
    return SPECIFICATIONS["index_logits"](query, head_weights, keys, table, own, kv_lens)


def rounded_query(query: Tensor, dtype: torch.dtype) -> Tensor:
    """dtype [B, W, Hi, Di]: the numbers that a query's FP8 codes and scales stand for."""
    codes, scale = quantise_tiles(query.to(dtype), query.shape[-1])
    return dequantise_tiles(codes, scale, dtype)
