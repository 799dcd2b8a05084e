# SPDX-License-Identifier: Apache-2.0
"""What stands between the first and the second step of a DeepSeek-V4 layer's attention.

Each op is defined by the ops that it joins, as those of `steps` are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.dense import normalise_rms
from freewheel.ops.registry import SPECIFICATIONS, op


def _fake_place_inputs(
    products: Tensor,
    dtype: torch.dtype,
    cache: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    slots: Tensor,
    gate_scale: float,
    entries: Tensor | None = None,
    raw: Tensor | None = None,
    bias: Tensor | None = None,
    entry_weight: Tensor | None = None,
    index_entries: Tensor | None = None,
    index_raw: Tensor | None = None,
    *_: Tensor | None,
) -> tuple[Tensor, Tensor]:
    latent = products.new_empty((*slots.shape, len(query_weight)), dtype=dtype)
    used = len(query_weight) + len(key_weight)
    used += sum(one.shape[2] for one in (raw, index_raw) if one is not None)
    return latent, products.new_empty((*slots.shape, products.shape[-1] - used))


@op(
    "place_inputs(Tensor products, ScalarType dtype, Tensor(a!) cache, Tensor query_weight, "
    "Tensor key_weight, float eps, Tensor positions, Tensor rope_table, Tensor slots, "
    "float gate_scale, Tensor(b!)? entries=None, Tensor(c!)? raw=None, Tensor? bias=None, "
    "Tensor? entry_weight=None, Tensor(d!)? index_entries=None, Tensor(e!)? index_raw=None, "
    "Tensor? index_bias=None, Tensor? index_weight=None, Tensor? raw_write_slots=None, "
    "Tensor? windows=None, Tensor? write_slots=None, Tensor? raw_slots=None) -> (Tensor, Tensor)",
    fake=_fake_place_inputs,
)
def place_inputs(
    products: Tensor,  # float [P, B, W, L + D + 2C + 2C' + G]
    dtype: torch.dtype,
    cache: Tensor,  # [n_pages, page_size, D]
    query_weight: Tensor,  # [L]
    key_weight: Tensor,  # [D]
    eps: float,
    positions: Tensor,  # int32 [B, W]  of a row's queries: ascending by one; each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    slots: Tensor,  # int64 [B, W]
    gate_scale: float,
    entries: Tensor | None = None,  # [m_pages, page_rows, D]  from here on as `store_entries`
    raw: Tensor | None = None,  # float [l_pages, page_size, 2C]
    bias: Tensor | None = None,  # float [ratio, C]
    entry_weight: Tensor | None = None,  # [D]
    index_entries: Tensor | None = None,  # [m_pages, page_rows, D']
    index_raw: Tensor | None = None,  # float [l_pages, page_size, 2C']
    index_bias: Tensor | None = None,  # float [ratio, C']
    index_weight: Tensor | None = None,  # [D']
    raw_write_slots: Tensor | None = None,  # int64 [B, W]
    windows: Tensor | None = None,  # int32 [B, K]
    write_slots: Tensor | None = None,  # int64 [B, K]
    raw_slots: Tensor | None = None,  # int32 [B, K, span]
) -> tuple[Tensor, Tensor]:  # dtype [B, W, L], float [B, W, G]
    """(the normed query latents, the gates times gate_scale) of what `shared_products` gives.

    Stored on the way: the keys, as `store_key` does, and, where a layer has entries, raw rows and
    the entries that they complete, as `store_entries` does; those of an indexer likewise.
    """
    total, lora, dim = products.sum(0), len(query_weight), len(key_weight)
    query, key, rest = total.split((lora, dim, total.shape[-1] - lora - dim), -1)
    SPECIFICATIONS["store_key"](cache, key, key_weight, eps, positions, rope_table, slots)
    planned = (windows, write_slots, raw_slots)
    kinds = (
        (entries, raw, bias, entry_weight),
        (index_entries, index_raw, index_bias, index_weight),
    )
    for own, own_raw, own_bias, weight in kinds:
        if own is not None and own_raw is not None:
            values, rest = rest.tensor_split((own_raw.shape[2],), -1)
            into = (own, own_raw, values, positions, raw_write_slots)
            SPECIFICATIONS["store_entries"](*into, own_bias, weight, eps, rope_table, *planned)
    return normalise_rms(query, query_weight, eps).to(dtype), rest * gate_scale


def _fake_open_queries(
    joined: Tensor, dim: int, eps: float, index_heads: int, index_dim: int, *_: Tensor
) -> tuple[Tensor, Tensor]:
    lead, heads = joined.shape[:-1], (joined.shape[-1] - index_heads * index_dim) // dim
    own = joined.new_empty((*lead, heads, dim))
    return own, joined.new_empty((*lead, index_heads, index_dim))


@op(
    "open_queries(Tensor joined, int dim, float eps, int index_heads, int index_dim, "
    "Tensor positions, Tensor rope_table) -> (Tensor, Tensor)",
    fake=_fake_open_queries,
)
def open_queries(
    joined: Tensor,  # [B, W, H * D + Hi * Di]
    dim: int,
    eps: float,
    index_heads: int,
    index_dim: int,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
) -> tuple[Tensor, Tensor]:  # [B, W, H, D], [B, W, Hi, Di]
    """`open_query` of the queries, and `rope_tail` of an indexer's behind them; Hi may be 0."""
    behind = index_heads * index_dim
    query, index = joined.split((joined.shape[-1] - behind, behind), -1)
    opened = SPECIFICATIONS["open_query"](
        query.unflatten(-1, (-1, dim)), eps, positions, rope_table
    )
    heads = index.reshape(*index.shape[:-1], index_heads, index_dim)
    if not index_heads:
        return opened, heads
    return opened, SPECIFICATIONS["rope_tail"](heads, positions, rope_table, False)
