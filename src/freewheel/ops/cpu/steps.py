# SPDX-License-Identifier: Apache-2.0
"""Steps of a DeepSeek-V4 layer by the CPU bodies of the ops that each joins."""

from __future__ import annotations

from torch import Tensor

import freewheel.ops.steps  # noqa: F401 - declares what this file implements
from freewheel.ops.cpu.compressed import compress, open_query, rope_tail, store_key
from freewheel.ops.cpu.dense import rms_norm
from freewheel.ops.cpu.hyper import hyper_open
from freewheel.ops.cpu.sinks import sink_attention
from freewheel.ops.registry import SPECIFICATIONS, implement


@implement("hyper_enter", "cpu")
def hyper_enter(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    layer_weight: Tensor,
    layer_eps: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    x, post, mix = hyper_open(streams, weight, base, scale, norm_eps, eps, iterations, fixed)
    return rms_norm(x, layer_weight, layer_eps), post, mix


@implement("place_heads", "cpu")
def place_heads(
    cache: Tensor,
    query: Tensor,
    query_eps: float,
    key: Tensor,
    norm_weight: Tensor,
    key_eps: float,
    positions: Tensor,
    rope_table: Tensor,
    slots: Tensor,
) -> Tensor:
    store_key(cache, key, norm_weight, key_eps, positions, rope_table, slots)
    return open_query(query, query_eps, positions, rope_table)


@implement("window_attention", "cpu")
def window_attention(
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
    mixed = sink_attention(query, keys, slots, entries, entry_slots, sinks, scale)
    return rope_tail(mixed, positions, rope_table, True)


@implement("store_entries", "cpu")
def store_entries(
    cache: Tensor,
    raw: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    rope_table: Tensor,
    windows: Tensor,
    write_slots: Tensor,
    raw_slots: Tensor,
) -> None:
    del positions  # the values lie in the cache before they are mixed
    SPECIFICATIONS["store_raw"](raw, values, slots)
    compress(cache, raw, bias, norm_weight, eps, rope_table, windows, write_slots, raw_slots)
