# SPDX-License-Identifier: Apache-2.0
"""What stands between the projections of sparse attention: norms, rotations, small products.

Inputs may be slices of one projection's output: only their last dimension must be contiguous.
Sums are wide and rounded once, as in `ops.dense`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freewheel.ops.attention import sparse_mla
from freewheel.ops.dense import angles_at, normalise_rms, rotate, wide
from freewheel.ops.registry import SPECIFICATIONS, op


def angles_of_heads(rope_table: Tensor, positions: Tensor) -> Tensor:
    """[B, W, 1, Dr]: rows of `rope_table` [T, Dr] at `positions` int32 [B, W], for all heads."""
    return angles_at(rope_table, positions).unsqueeze(2)


def _fake_norm_latents(cache: Tensor, query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@op(
    "norm_latents(Tensor(a!) cache, Tensor query, Tensor query_weight, Tensor compressed, "
    "Tensor latent_weight, float eps, Tensor positions, Tensor rope_table, bool interleaved, "
    "Tensor slots) -> Tensor",
    fake=_fake_norm_latents,
)
def norm_latents(
    cache: Tensor,  # [n_pages, page_size, C + Dr]
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
    """The queries' latent, normed; that of the keys is stored as by `store_latent`."""
    store = SPECIFICATIONS["store_latent"]
    store(cache, compressed, latent_weight, eps, positions, rope_table, interleaved, slots)
    return normalise_rms(wide(query), query_weight, eps).to(query.dtype)


def _fake_index_queries(
    cache: Tensor, query: Tensor, gates: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    query = torch.empty_like(query, memory_format=torch.contiguous_format)
    return query, torch.empty_like(gates, memory_format=torch.contiguous_format)


@op(
    "index_queries(Tensor(a!) cache, Tensor query, Tensor gates, float gate_scale, Tensor key, "
    "Tensor norm_weight, Tensor norm_bias, float eps, Tensor positions, Tensor rope_table, "
    "bool interleaved, Tensor slots) -> (Tensor, Tensor)",
    fake=_fake_index_queries,
)
def index_queries(
    cache: Tensor,  # [n_pages, page_size, Di]
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
    """The indexer's queries, rotated, and its gates, scaled; its key is stored.

    As `rope` from dimension 0 on, a product, and `store_index_key`.
    """
    store = SPECIFICATIONS["store_index_key"]
    store(cache, key, norm_weight, norm_bias, eps, positions, rope_table, interleaved, slots)
    turned = SPECIFICATIONS["rope"](query, positions, rope_table, 0, interleaved)
    return turned, gates * gate_scale


def _fake_absorb_query(query: Tensor, key_up: Tensor, *_: object) -> Tensor:
    rope = query.shape[3] - key_up.shape[1]
    return query.new_empty((*query.shape[:3], key_up.shape[2] + rope))


@op(
    "absorb_query(Tensor query, Tensor key_up, Tensor positions, Tensor rope_table, "
    "bool interleaved) -> Tensor",
    fake=_fake_absorb_query,
)
def absorb_query(
    query: Tensor,  # [B, W, H, N + Dr]  output of q_b_proj
    key_up: Tensor,  # [H, N, C]
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    interleaved: bool,
) -> Tensor:  # [B, W, H, C + Dr]
    """Queries for keys as they are stored (DeepSeek-V2, arXiv:2405.04434, 2.1.2).

    The first N dimensions go through the up-projection of keys, the last Dr are rotated.
    """
    nope = key_up.shape[1]
    source = wide(query)
    absorbed = torch.einsum("bwhn,hnc->bwhc", source[..., :nope], wide(key_up))
    turned = rotate(source[..., nope:], angles_of_heads(rope_table, positions), interleaved)
    return torch.cat((absorbed, turned), dim=-1).to(query.dtype)


def _fake_place_queries(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    queries, gates = _fake_index_queries(*args[:12])
    return queries, gates, _fake_absorb_query(*args[12:])


@op(
    "place_queries(Tensor(a!) cache, Tensor query, Tensor gates, float gate_scale, Tensor key, "
    "Tensor norm_weight, Tensor norm_bias, float eps, Tensor positions, Tensor rope_table, "
    "bool interleaved, Tensor slots, Tensor own, Tensor key_up, bool own_interleaved) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_place_queries,
)
def place_queries(
    cache: Tensor,  # [n_pages, page_size, Di]
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
    """All that is made of one input's queries: `index_queries`, and `absorb_query` of `own`."""
    queries, gates = SPECIFICATIONS["index_queries"](
        cache, query, gates, gate_scale, key, norm_weight, norm_bias, eps, positions, rope_table,
        interleaved, slots,
    )  # fmt: skip
    absorb = SPECIFICATIONS["absorb_query"]
    return queries, gates, absorb(own, key_up, positions, rope_table, own_interleaved)


@op(
    "expand_values(Tensor mixed, Tensor value_up) -> Tensor",
    fake=lambda x, up: x.new_empty((*x.shape[:2], up.shape[0] * up.shape[2])),
)
def expand_values(
    mixed: Tensor,  # [B, W, H, C]  output of sparse_mla
    value_up: Tensor,  # [H, C, V]
) -> Tensor:  # [B, W, H * V]
    """Each head's mixture of latents through its up-projection of values, side by side."""
    values = torch.einsum("bwhc,hcv->bwhv", wide(mixed), wide(value_up))
    return values.flatten(2).to(mixed.dtype)


@op(
    "sparse_mla_values(Tensor query, Tensor latent, Tensor slots, float scale, Tensor value_up, "
    "Tensor? page_table=None, Tensor? rows=None) -> Tensor",
    fake=lambda query, latent, slots, scale, up, *_: query.new_empty(
        (*query.shape[:2], up.shape[0] * up.shape[2])
    ),
)
def sparse_mla_values(
    query: Tensor,  # [B, W, H, D]
    latent: Tensor,  # [n_pages, page_size, D]
    slots: Tensor,  # int32 [B, W, K]
    scale: float,
    value_up: Tensor,  # [H, C, V]
    page_table: Tensor | None = None,  # int32 [R, P]
    rows: Tensor | None = None,  # int32 [B]
) -> Tensor:  # [B, W, H * V]
    """`expand_values` of what `sparse_mla` gives of the same arguments, rounded in between."""
    place = {"page_table": page_table, "rows": rows}
    mixed = SPECIFICATIONS["sparse_mla"](query, latent, slots, scale, value_up.shape[1], **place)
    return SPECIFICATIONS["expand_values"](mixed, value_up)


def values_apart(
    query: Tensor,
    latent: Tensor,
    slots: Tensor,
    scale: float,
    value_up: Tensor,
    page_table: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """`sparse_mla_values` of the same arguments, by the ops that it is made of."""
    rank = value_up.shape[1]
    mixed = sparse_mla(query, latent, slots, scale, rank, page_table=page_table, rows=rows)
    return expand_values(mixed, value_up)
