# SPDX-License-Identifier: Apache-2.0
"""Write one step's keys into the paged caches.

A cache is [n_pages, page_size, D]; slot s is row s of its [n_pages * page_size, D] view. Only the
rows in `slots` change. Padding queries carry slot 0, in the scratch page 0, where any of them may
win.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.dense import angles_at, normalise_layer, normalise_rms, rotate, wide
from freewheel.ops.registry import nothing, op


@op(
    "store_latent(Tensor(a!) cache, Tensor compressed, Tensor norm_weight, float eps, "
    "Tensor positions, Tensor rope_table, bool interleaved, Tensor slots) -> ()",
    fake=nothing,
)
def store_latent(
    cache: Tensor,  # [n_pages, page_size, C + Dr]
    compressed: Tensor,  # [B, W, C + Dr]  output of kv_a_proj_with_mqa
    norm_weight: Tensor,  # [C]
    eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    interleaved: bool,
    slots: Tensor,  # int64 [B, W]
) -> None:
    """Store MLA's latent: rms_norm(first C) and rope(last Dr) (arXiv:2405.04434, 2.1)."""
    rows = latent_rows(compressed, norm_weight, eps, positions, rope_table, interleaved)
    write_rows(cache, rows, slots)


def latent_rows(
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
) -> Tensor:
    """float [B, W, C + Dr]: what `store_latent` stores."""
    rank = norm_weight.shape[0]
    source = wide(compressed)
    latent = normalise_rms(source[..., :rank], norm_weight, eps)
    key = rotate(source[..., rank:], angles_at(rope_table, positions), interleaved)
    return torch.cat((latent, key), dim=-1)


@op(
    "store_index_key(Tensor(a!) cache, Tensor key, Tensor norm_weight, Tensor norm_bias, "
    "float eps, Tensor positions, Tensor rope_table, bool interleaved, Tensor slots) -> ()",
    fake=nothing,
)
def store_index_key(
    cache: Tensor,  # [n_pages, page_size, Di]
    key: Tensor,  # [B, W, Di]  output of the indexer's wk
    norm_weight: Tensor,  # [Di]
    norm_bias: Tensor,  # [Di]
    eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    interleaved: bool,
    slots: Tensor,  # int64 [B, W]
) -> None:
    """Store the lightning indexer's key: layer_norm(key) with its first Dr dimensions rotated.

    DeepSeek-V3.2 pairs the rotated dimensions by halves, GLM-5 pairs neighbours (`interleaved`).
    """
    rows = index_key_rows(key, norm_weight, norm_bias, eps, positions, rope_table, interleaved)
    write_rows(cache, rows, slots)


def index_key_rows(
    key: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
) -> Tensor:
    """float [B, W, Di]: what `store_index_key` stores."""
    span = rope_table.shape[1]
    normed = normalise_layer(wide(key), norm_weight, norm_bias, eps)
    turned = rotate(normed[..., :span], angles_at(rope_table, positions), interleaved)
    return torch.cat((turned, normed[..., span:]), dim=-1)


def write_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Copy rows [B, W, D] to int64 slots [B, W] of cache [n_pages, page_size, D]."""
    flat = cache.view(-1, cache.shape[-1])
    flat.index_copy_(0, slots.flatten(), rows.flatten(0, 1).to(cache.dtype))
