# SPDX-License-Identifier: Apache-2.0
"""Projections together with what reads them, in one op: their parts are added up as they are read.

A projection of few outputs is shared out among programs by its inputs. Alone it then takes a second
launch to add up what these found (`openings` for the one that opens the attention).
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.clamped import route_best
from freewheel.ops.dense import add_rms_norm, route
from freewheel.ops.linear import wide_linear
from freewheel.ops.quantised import block_linear
from freewheel.ops.registry import SPECIFICATIONS, op


@op(
    "block_add_rms_norm(Tensor x, Tensor weight, Tensor weight_scale, Tensor residual, "
    "Tensor norm_weight, float eps, bool fixed=False) -> (Tensor, Tensor)",
    fake=lambda x, weight, scale, residual, *_: (
        torch.empty_like(residual, memory_format=torch.contiguous_format),
        torch.empty_like(residual, memory_format=torch.contiguous_format),
    ),
)
def block_add_rms_norm(
    x: Tensor,  # [..., K]
    weight: Tensor,  # float8_e4m3fn [N, K]
    weight_scale: Tensor,  # float32 [ceil(N / 128), ceil(K / 128)]
    residual: Tensor,  # [..., N]
    norm_weight: Tensor,  # [N]
    eps: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:  # [..., N], [..., N]
    """`add_rms_norm` of what `block_linear` gives, rounded in between; `fixed` as for that."""
    projected = SPECIFICATIONS["block_linear"](x, weight, weight_scale)
    return SPECIFICATIONS["add_rms_norm"](projected, residual, norm_weight, eps)


def add_norm_apart(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """`block_add_rms_norm` of the same arguments, by the ops that it is made of."""
    return add_rms_norm(block_linear(x, weight, scale, fixed=fixed), residual, norm_weight, eps)


def _fake_route(
    x: Tensor, weight: Tensor, bias: Tensor, n_group: int, topk_group: int, top_k: int, *_: object
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], top_k)
    return weight.new_empty(shape), weight.new_empty(shape, dtype=torch.int32)


@op(
    "wide_route(Tensor x, Tensor weight, Tensor bias, int n_group, int topk_group, int top_k, "
    "bool normalise, float scale, bool fixed=False) -> (Tensor, Tensor)",
    fake=_fake_route,
)
def wide_route(
    x: Tensor,  # [..., H]
    weight: Tensor,  # float [E, H]  of the router
    bias: Tensor,  # float [E]  e_score_correction_bias
    n_group: int,
    topk_group: int,
    top_k: int,
    normalise: bool,
    scale: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:  # float [..., top_k], int32 [..., top_k]
    """`route` by the logits that `wide_linear` gives; `fixed` as for that."""
    logits = SPECIFICATIONS["wide_linear"](x, weight)
    return SPECIFICATIONS["route"](logits, bias, n_group, topk_group, top_k, normalise, scale)


def wide_route_apart(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    normalise: bool,
    scale: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """`wide_route` of the same arguments, by the ops that it is made of."""
    logits = wide_linear(x, weight, fixed)
    return route(logits, bias, n_group, topk_group, top_k, normalise, scale)


def _fake_route_best(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, *_: object
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], top_k)
    return weight.new_empty(shape), weight.new_empty(shape, dtype=torch.int32)


@op(
    "wide_route_best(Tensor x, Tensor weight, Tensor bias, int top_k, float scale, "
    "bool fixed=False) -> (Tensor, Tensor)",
    fake=_fake_route_best,
)
def wide_route_best(
    x: Tensor,  # [..., H]
    weight: Tensor,  # float [E, H]  of the router
    bias: Tensor,  # float [E]
    top_k: int,
    scale: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:  # float [..., top_k], int32 [..., top_k]
    """`route_best` by the logits that `wide_linear` gives; `fixed` as for that."""
    logits = SPECIFICATIONS["wide_linear"](x, weight)
    return SPECIFICATIONS["route_best"](logits, bias, top_k, scale)


def wide_route_best_apart(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """`wide_route_best` of the same arguments, by the ops that it is made of."""
    return route_best(wide_linear(x, weight, fixed), bias, top_k, scale)
