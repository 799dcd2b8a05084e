# SPDX-License-Identifier: Apache-2.0
"""Sparse attention between its projections, by the CPU bodies of the ops that each joins."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.cpu.cache import store_index_key, store_latent
from freewheel.ops.cpu.dense import rms_norm, rope, turned_halves
from freewheel.ops.dense import wide
from freewheel.ops.latents import angles_of_heads, values_apart
from freewheel.ops.registry import implement


@implement("norm_latents", "cpu")
def norm_latents(
    cache: Tensor,
    query: Tensor,
    query_weight: Tensor,
    compressed: Tensor,
    latent_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
) -> Tensor:
    store_latent(cache, compressed, latent_weight, eps, positions, rope_table, interleaved, slots)
    return rms_norm(query, query_weight, eps)


@implement("index_queries", "cpu")
def index_queries(
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
) -> tuple[Tensor, Tensor]:
    place = (positions, rope_table, interleaved, slots)
    store_index_key(cache, key, norm_weight, norm_bias, eps, *place)
    return rope(query, positions, rope_table, 0, interleaved), gates * gate_scale


@implement("absorb_query", "cpu")
def absorb_query(
    query: Tensor, key_up: Tensor, positions: Tensor, rope_table: Tensor, interleaved: bool
) -> Tensor:
    (batch, width, heads, _), (_, nope, rank) = query.shape, key_up.shape
    source = wide(query).flatten(0, 1)  # [N, H, nope + Dr]
    absorbed = torch.bmm(source[..., :nope].transpose(0, 1), wide(key_up)).transpose(0, 1)
    angles = angles_of_heads(rope_table, positions).flatten(0, 1).to(source.dtype)
    turned = turned_halves(source[..., nope:], angles, interleaved)
    joined = torch.cat((absorbed, *turned), dim=-1)
    return joined.view(batch, width, heads, rank + angles.shape[-1]).to(query.dtype)


@implement("place_queries", "cpu")
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
    queries, gates = index_queries(
        cache, query, gates, gate_scale, key, norm_weight, norm_bias, eps, positions, rope_table,
        interleaved, slots,
    )  # fmt: skip
    return queries, gates, absorb_query(own, key_up, positions, rope_table, own_interleaved)


@implement("expand_values", "cpu")
def expand_values(mixed: Tensor, value_up: Tensor) -> Tensor:
    (batch, width, _, _), (heads, _, dim) = mixed.shape, value_up.shape
    by_head = wide(mixed).flatten(0, 1).transpose(0, 1)  # [H, N, C]
    values = torch.bmm(by_head, wide(value_up)).transpose(0, 1)  # [N, H, V]
    return values.reshape(batch, width, heads * dim).to(mixed.dtype)


implement("sparse_mla_values", "cpu")(values_apart)
