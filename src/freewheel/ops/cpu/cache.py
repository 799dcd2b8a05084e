# SPDX-License-Identifier: Apache-2.0
"""Stores with few passes: the cached row is put together by one concatenation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.cache import write_rows
from freewheel.ops.cpu.dense import normalised, turned_halves
from freewheel.ops.dense import angles_at, wide
from freewheel.ops.registry import implement


@implement("store_latent", "cpu")
def store_latent(
    cache: Tensor,
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
) -> None:
    rank = norm_weight.shape[0]
    source = wide(compressed)
    latent = normalised(source[..., :rank], norm_weight, eps)
    angles = angles_at(rope_table, positions).to(source.dtype)
    key = turned_halves(source[..., rank:], angles, interleaved)
    write_rows(cache, torch.cat((latent, *key), dim=-1), slots)


@implement("store_index_key", "cpu")
def store_index_key(
    cache: Tensor,
    key: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
) -> None:
    span = rope_table.shape[1]
    source = wide(key)
    weight, bias = norm_weight.to(source.dtype), norm_bias.to(source.dtype)
    normed = F.layer_norm(source, (source.shape[-1],), weight, bias, eps)
    angles = angles_at(rope_table, positions).to(source.dtype)
    turned = turned_halves(normed[..., :span], angles, interleaved)
    write_rows(cache, torch.cat((*turned, normed[..., span:]), dim=-1), slots)
