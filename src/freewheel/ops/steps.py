# SPDX-License-Identifier: Apache-2.0
"""What stands between two projections of a DeepSeek-V4 layer, each step as one op.

Each is defined by the ops that it joins, in their order: a kernel of its own saves the launches and
the passes over memory between them, and gives the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freewheel.ops.hyper import hyper_close
from freewheel.ops.registry import SPECIFICATIONS, nothing, op


def _fake_hyper_enter(streams: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    lead, (count, dim) = streams.shape[:-2], streams.shape[-2:]
    dtype = torch.float64 if streams.dtype == torch.float64 else torch.float32
    post = streams.new_empty((*lead, count), dtype=dtype)
    return streams.new_empty((*lead, dim)), post, post.new_empty((*lead, count, count))


@op(
    "hyper_enter(Tensor streams, Tensor weight, Tensor base, Tensor scale, float norm_eps, "
    "float eps, int iterations, Tensor layer_weight, float layer_eps, bool fixed=False) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_hyper_enter,
)
def hyper_enter(
    streams: Tensor,  # [..., N, D]
    weight: Tensor,  # float [(2 + N) * N, N * D]
    base: Tensor,  # float [(2 + N) * N]
    scale: Tensor,  # float [3]
    norm_eps: float,
    eps: float,
    iterations: int,
    layer_weight: Tensor,  # float [D]
    layer_eps: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # [..., D], float [..., N], float [..., N, N]
    """`hyper_open`, `fixed` as for that, and `rms_norm` of the x that it gives."""
    opened = SPECIFICATIONS["hyper_open"](streams, weight, base, scale, norm_eps, eps, iterations)
    x, post, mix = opened
    return SPECIFICATIONS["rms_norm"](x, layer_weight, layer_eps), post, mix


def _fake_hyper_cross(
    y: Tensor, streams: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    return out, *_fake_hyper_enter(streams)


@op(
    "hyper_cross(Tensor y, Tensor streams, Tensor post, Tensor mix, Tensor weight, Tensor base, "
    "Tensor scale, float norm_eps, float eps, int iterations, Tensor layer_weight, "
    "float layer_eps, bool fixed=False) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_hyper_cross,
)
def hyper_cross(
    y: Tensor,  # [..., D]  the output of the layer that is left
    streams: Tensor,  # [..., N, D]
    post: Tensor,  # float [..., N]
    mix: Tensor,  # float [..., N, N]
    weight: Tensor,  # float [(2 + N) * N, N * D]  of the layer that is entered, as those behind it
    base: Tensor,  # float [(2 + N) * N]
    scale: Tensor,  # float [3]
    norm_eps: float,
    eps: float,
    iterations: int,
    layer_weight: Tensor,  # float [D]
    layer_eps: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [..., N, D], [..., D], float [..., N], [..., N, N]
    """From one layer into the next: `hyper_close`, and `hyper_enter` of the streams it gives.

    `fixed`: kernels for a GPU keep one order of sums, whatever the number of tokens.
    """
    streams = SPECIFICATIONS["hyper_close"](y, streams, post, mix)
    own = (weight, base, scale, norm_eps, eps, iterations, layer_weight, layer_eps)
    return streams, *SPECIFICATIONS["hyper_enter"](streams, *own)


def hyper_cross_apart(
    y: Tensor, streams: Tensor, post: Tensor, mix: Tensor, *own: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`hyper_cross` of the same arguments, by the ops that it is made of."""
    streams = hyper_close(y, streams, post, mix)
    return streams, *hyper_enter(streams, *own)


@op(
    "place_heads(Tensor(a!) cache, Tensor query, float query_eps, Tensor key, Tensor norm_weight, "
    "float key_eps, Tensor positions, Tensor rope_table, Tensor slots) -> Tensor",
    fake=lambda _, query, *__: torch.empty_like(query, memory_format=torch.contiguous_format),
)
def place_heads(
    cache: Tensor,  # [n_pages, page_size, D]
    query: Tensor,  # [B, W, H, D]
    query_eps: float,
    key: Tensor,  # [B, W, D]
    norm_weight: Tensor,  # [D]
    key_eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    slots: Tensor,  # int64 [B, W]
) -> Tensor:  # [B, W, H, D]
    """`store_key` of the keys, and `open_query` of the queries."""
    store = SPECIFICATIONS["store_key"]
    store(cache, key, norm_weight, key_eps, positions, rope_table, slots)
    return SPECIFICATIONS["open_query"](query, query_eps, positions, rope_table)


@op(
    "window_attention(Tensor query, Tensor keys, Tensor slots, Tensor entries, "
    "Tensor entry_slots, Tensor sinks, float scale, Tensor positions, Tensor rope_table, "
    "bool fixed=False) -> Tensor",
    fake=lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
)
def window_attention(
    query: Tensor,  # [B, W, H, D]
    keys: Tensor,  # [n_pages, page_size, D]
    slots: Tensor,  # int32 [B, W, K]  negative: no key
    entries: Tensor,  # [m_pages, page_rows, D]
    entry_slots: Tensor,  # int32 [B, W, E]  negative: no entry
    sinks: Tensor,  # float [H]
    scale: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    fixed: bool = False,
) -> Tensor:  # [B, W, H, D]
    """`sink_attention`, and `rope_tail` back of what it gives.

    `fixed`: kernels for a GPU sum in one order, whatever the number of queries.
    """
    del fixed
    attend, turn = SPECIFICATIONS["sink_attention"], SPECIFICATIONS["rope_tail"]
    mixed = attend(query, keys, slots, entries, entry_slots, sinks, scale)
    return turn(mixed, positions, rope_table, True)


@op(
    "store_entries(Tensor(a!) cache, Tensor(b!) raw, Tensor values, Tensor positions, "
    "Tensor slots, Tensor bias, Tensor norm_weight, float eps, Tensor rope_table, Tensor windows, "
    "Tensor write_slots, Tensor raw_slots) -> ()",
    fake=nothing,
)
def store_entries(
    cache: Tensor,  # [n_pages, page_rows, D]
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
    """`store_raw` of the values, then `compress` of the windows that close among them.

    Windows and slots are those that `plan_closings` gives for these positions.
    """
    SPECIFICATIONS["store_raw"](raw, values, slots)
    planned = (windows, write_slots, raw_slots)
    SPECIFICATIONS["compress"](cache, raw, bias, norm_weight, eps, rope_table, *planned)
