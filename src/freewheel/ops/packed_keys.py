# SPDX-License-Identifier: Apache-2.0
"""Compressed attention over packed caches of keys and entries: quantised once, at the store.

Each op is the one of the same name without `fp8_`, over rows as `spec.rows` describes them. Raw
rows, which entries are mixed from, are float32 as ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.compressed import key_rows, mix_entries
from freewheel.ops.dense import wide
from freewheel.ops.packed import renumbered
from freewheel.ops.registry import SPECIFICATIONS, nothing, op
from freewheel.ops.rows import read_keys, write_index_keys, write_keys


@op(
    "fp8_place_heads(Tensor(a!) cache, Tensor query, float query_eps, Tensor key, "
    "Tensor norm_weight, float key_eps, Tensor positions, Tensor rope_table, Tensor slots) "
    "-> Tensor",
    fake=lambda _, query, *__: torch.empty_like(query, memory_format=torch.contiguous_format),
)
def fp8_place_heads(
    cache: Tensor,  # uint8 [n_pages, page_size, bytes]
    query: Tensor,  # [B, W, H, D]
    query_eps: float,
    key: Tensor,  # [B, W, D]
    norm_weight: Tensor,  # [D]
    key_eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    slots: Tensor,  # int64 [B, W]
) -> Tensor:  # [B, W, H, D]
    """Keys stored, and queries opened: `place_heads`."""
    rows = key_rows(key, norm_weight, key_eps, positions, rope_table)
    write_keys(cache, rows, slots, rope_table.shape[1])
    return SPECIFICATIONS["open_query"](query, query_eps, positions, rope_table)


@op(
    "fp8_window_attention(Tensor query, Tensor keys, Tensor slots, Tensor entries, "
    "Tensor entry_slots, Tensor sinks, float scale, Tensor positions, Tensor rope_table, "
    "bool fixed=False) -> Tensor",
    fake=lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
)
def fp8_window_attention(
    query: Tensor,  # [B, W, H, D]
    keys: Tensor,  # uint8 [n_pages, page_size, bytes]
    slots: Tensor,  # int32 [B, W, K]  negative: no key
    entries: Tensor,  # uint8 [m_pages, page_rows, bytes]
    entry_slots: Tensor,  # int32 [B, W, E]  negative: no entry
    sinks: Tensor,  # float [H]
    scale: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    fixed: bool = False,
) -> Tensor:  # [B, W, H, D]
    """`window_attention` over the numbers that the rows stand for."""
    del fixed
    rope, dim, dtype = rope_table.shape[1], query.shape[3], wide(query).dtype

    def row(b: int) -> Tensor:
        """One row of the batch: as many rows are gathered at once as its queries name."""
        parts = ((keys, slots[b : b + 1]), (entries, entry_slots[b : b + 1]))
        plain = [
            (read_keys(cache, own.clamp(min=0).flatten(), dim, rope, dtype)[None], renumbered(own))
            for cache, own in parts
        ]
        attend = SPECIFICATIONS["sink_attention"]
        return attend(query[b : b + 1], *plain[0], *plain[1], sinks, scale)

    mixed = [row(b) for b in range(query.shape[0])]
    joined = torch.cat(mixed) if mixed else torch.empty_like(query)
    return SPECIFICATIONS["rope_tail"](joined, positions, rope_table, True)


@op(
    "fp8_store_entries(Tensor(a!) cache, Tensor(b!) raw, Tensor values, Tensor positions, "
    "Tensor slots, Tensor bias, Tensor norm_weight, float eps, Tensor rope_table, Tensor windows, "
    "Tensor write_slots, Tensor raw_slots) -> ()",
    fake=nothing,
)
def fp8_store_entries(
    cache: Tensor,  # uint8 [n_pages, page_rows, bytes]
    raw: Tensor,  # float [m_pages, page_size, 2C]
    values: Tensor,  # float [B, W, 2C]
    positions: Tensor,  # int32 [B, W]  of a row's queries: ascending by one
    slots: Tensor,  # int64 [B, W]
    bias: Tensor,  # float [ratio, C]
    norm_weight: Tensor,  # [D]
    eps: float,
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    windows: Tensor,  # int32 [B, K]
    write_slots: Tensor,  # int64 [B, K]
    raw_slots: Tensor,  # int32 [B, K, span]
) -> None:
    """Raw rows stored, and the entries of the windows that close: `store_entries`, packed keys."""
    del positions  # raw rows lie in the cache before they are mixed
    SPECIFICATIONS["store_raw"](raw, values, slots)
    entry = mix_entries(raw, bias, norm_weight, eps, rope_table, windows, raw_slots)
    write_keys(cache, entry, write_slots, rope_table.shape[1])


@op(
    "fp8_store_index_entries(Tensor(a!) cache, Tensor(b!) raw, Tensor values, Tensor positions, "
    "Tensor slots, Tensor bias, Tensor norm_weight, float eps, Tensor rope_table, Tensor windows, "
    "Tensor write_slots, Tensor raw_slots) -> ()",
    fake=nothing,
)
def fp8_store_index_entries(
    cache: Tensor,  # uint8 [n_pages, page_rows, bytes]
    raw: Tensor,  # float [m_pages, page_size, 2C]
    values: Tensor,  # float [B, W, 2C]
    positions: Tensor,  # int32 [B, W]
    slots: Tensor,  # int64 [B, W]
    bias: Tensor,  # float [ratio, C]
    norm_weight: Tensor,  # [D]
    eps: float,
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    windows: Tensor,  # int32 [B, K]
    write_slots: Tensor,  # int64 [B, K]
    raw_slots: Tensor,  # int32 [B, K, span]
) -> None:
    """As `fp8_store_entries`; the entries are packed index keys."""
    del positions
    SPECIFICATIONS["store_raw"](raw, values, slots)
    entry = mix_entries(raw, bias, norm_weight, eps, rope_table, windows, raw_slots)
    write_index_keys(cache, entry, write_slots)
