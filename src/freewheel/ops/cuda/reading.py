# SPDX-License-Identifier: Apache-2.0
"""Projections whose parts their reader adds up: one launch less for each (`parts`)."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.cuda import routing
from freewheel.ops.cuda.dense import norm_of_parts
from freewheel.ops.cuda.experts import route_parts
from freewheel.ops.cuda.linear import streams
from freewheel.ops.cuda.quantised import Given, fill_parts, shares, tile_of
from freewheel.ops.cuda.wide_products import wide_parts
from freewheel.ops.reading import add_norm_apart, wide_route_apart, wide_route_best_apart
from freewheel.ops.registry import implement

BLOCK = 128
"""Rows and inputs that one scale covers."""


@implement("block_add_rms_norm", "cuda")
def block_add_rms_norm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    (outputs, inputs), tokens = weight.shape, residual.numel() // weight.shape[0]
    given = Given(x.contiguous(), weight, scale, tokens, outputs, inputs, BLOCK, BLOCK)
    known = x.dtype in (torch.bfloat16, torch.float32) and x.dtype == residual.dtype
    tile = tile_of(given, fixed) if known and tokens else None
    if tile is None:
        return add_norm_apart(x, weight, scale, residual, norm_weight, eps, fixed)
    parts = shares(given, tile)[1]
    # A single part is rounded as it is stored, as several are when they are added up.
    kind = x.dtype if parts == 1 else torch.float32
    room = x.new_empty((parts, tokens, outputs), dtype=kind)
    fill_parts(given, room, tile)
    return norm_of_parts(room, residual, norm_weight, eps)


@implement("wide_route", "cuda")
def wide_route(
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
    own = (n_group, topk_group, top_k, normalise, scale)
    kinds = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and not x.is_cuda)
    few = streams(x, weight) and not fixed
    if not kinds or weight.dtype != torch.float32 or not x.numel() or few:
        return wide_route_apart(x, weight, bias, *own, fixed)
    return route_parts(wide_parts(x, weight, fixed=fixed), x.shape[:-1], bias, *own)


@implement("wide_route_best", "cuda")
def wide_route_best(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    kinds = (x.dtype, weight.dtype, bias.dtype)
    known = kinds == (torch.bfloat16, torch.float32, torch.float32) and x.numel() > 0
    few = streams(x, weight) and not fixed
    if not known or few or not routing.serves(x, len(weight), 1, top_k):
        return wide_route_best_apart(x, weight, bias, top_k, scale, fixed)
    shape = (*x.shape[:-1], top_k)
    weights, ids = weight.new_empty(shape), weight.new_empty(shape, dtype=torch.int32)
    parts = wide_parts(x, weight, fixed=fixed)
    routing.route_by_block(parts, bias, weights, ids, (1, 1), scale, True, True)
    return weights, ids
