# SPDX-License-Identifier: Apache-2.0
"""How sparse attention begins, in one op: the projections of its input, norms, and the store.

Whatever is made of one input and asks for nothing else belongs together: it can be read once, and a
projection's parts need not be added up before they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from freewheel.ops.latents import norm_latents
from freewheel.ops.linear import wide_linear
from freewheel.ops.quantised import block_linear
from freewheel.ops.registry import SPECIFICATIONS, op

Call = Callable[..., Tensor]


def _fake_open(
    cache: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    gate_weight: Tensor,
    query_weight: Tensor,
    latent_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    queries = query_weight.shape[0]
    keys = weight.shape[0] - queries - latent_weight.shape[0] - rope_table.shape[1]
    lead = x.shape[:-1]
    gates = gate_weight.new_empty((*lead, gate_weight.shape[0]))
    return x.new_empty((*lead, queries)), x.new_empty((*lead, keys)), gates


@op(
    "block_open_latents(Tensor(a!) cache, Tensor x, Tensor weight, Tensor weight_scale, "
    "Tensor gate_weight, Tensor query_weight, Tensor latent_weight, float eps, Tensor positions, "
    "Tensor rope_table, bool interleaved, Tensor slots, bool fixed=False) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_open,
)
def block_open_latents(
    cache: Tensor,  # [n_pages, page_size, C + Dr]
    x: Tensor,  # [B, W, K]
    weight: Tensor,  # float8_e4m3fn [Q + Di + C + Dr, K]  of queries, index keys, latents
    weight_scale: Tensor,  # float32 [ceil(N / 128), ceil(K / 128)]
    gate_weight: Tensor,  # float [Hi, K]  of the index gates
    query_weight: Tensor,  # [Q]
    latent_weight: Tensor,  # [C]
    eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    interleaved: bool,
    slots: Tensor,  # int64 [B, W]
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, W, Q], [B, W, Di], float [B, W, Hi]
    """The queries' latent, normed; index keys and gates as projected; latents are stored.

    As `block_linear`, `wide_linear` and `norm_latents` one after another. Di and Hi may be 0.
    `fixed` as for these.
    """
    call = SPECIFICATIONS
    given = (x, weight, weight_scale, gate_weight, query_weight, latent_weight, eps)
    place = (positions, rope_table, interleaved, slots)
    steps = (call["block_linear"], call["wide_linear"], call["norm_latents"])
    return _one_by_one(steps, cache, *given, *place)


def _one_by_one(
    steps: tuple[Call, Call, Call],
    cache: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    gate_weight: Tensor,
    query_weight: Tensor,
    latent_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    project, gate, norm = steps
    latents = latent_weight.shape[0] + rope_table.shape[1]
    queries = query_weight.shape[0]
    sizes = (queries, weight.shape[0] - queries - latents, latents)
    query, key, compressed = project(x, weight, weight_scale).split(sizes, dim=-1)
    place = (positions, rope_table, interleaved, slots)
    query = norm(cache, query, query_weight, compressed, latent_weight, eps, *place)
    # Neither may be a view of what was split: an op's results are its own.
    return query, key.clone(memory_format=torch.contiguous_format), gate(x, gate_weight)


def open_latents_apart(
    cache: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    gate_weight: Tensor,
    query_weight: Tensor,
    latent_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_open_latents` of the same arguments, by the ops that it is made of."""
    project, gate = partial(block_linear, fixed=fixed), partial(wide_linear, fixed=fixed)
    given = (x, weight, weight_scale, gate_weight, query_weight, latent_weight, eps)
    place = (positions, rope_table, interleaved, slots)
    return _one_by_one((project, gate, norm_latents), cache, *given, *place)
