# SPDX-License-Identifier: Apache-2.0
"""Tokens on their way to the ranks that hold their experts, and back: places that are static."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.registry import op


def _fake_dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, first: int, step: int, count: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lead = (ranks, x.shape[0])
    return (
        x.new_empty((*lead, x.shape[1])),
        ids.new_empty((*lead, ids.shape[1])),
        weights.new_empty((*lead, ids.shape[1])),
        ids.new_empty(lead),
    )


@op(
    "dispatch_tokens(Tensor x, Tensor ids, Tensor weights, int first, int step, int count, "
    "int ranks) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_dispatch,
)
def dispatch_tokens(
    x: Tensor,  # [T, H]
    ids: Tensor,  # int32 [T, top_k]
    weights: Tensor,  # float [T, top_k]
    first: int,
    step: int,
    count: int,
    ranks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What each rank r computes: tokens of which some expert is in first + r * step ... + count.

    For each rank: tokens [T, H], those that go there first, in their order, then zeros; their
    choices int32 [T, top_k] counted from the rank's first expert, with weights float [T, top_k];
    every other choice is -1, of nobody, with weight 0; and whose turn is where, int32 [T]: a
    permutation of the tokens, for `combine_tokens`.

    A token goes to a rank once, however many of its experts are there, so T places a rank hold all
    that can come: nothing is ever dropped, and no size depends on where tokens go.
    """
    begin = first + step * torch.arange(ranks, device=ids.device, dtype=ids.dtype)
    place = ids - begin[:, None, None]  # int32 [ranks, T, top_k]
    held = (place >= 0) & (place < count)
    goes = held.any(-1)  # bool [ranks, T]
    order = goes.logical_not().to(torch.uint8).sort(dim=1, stable=True).indices  # int64 [ranks, T]
    spread = order[..., None].expand(place.shape)
    sent = x[order].masked_fill(~goes.gather(1, order)[..., None], 0)
    return (
        sent,
        place.where(held, -1).gather(1, spread),
        weights.expand(held.shape).masked_fill(~held, 0).gather(1, spread),
        order.int(),
    )


@op(
    "combine_tokens(Tensor parts, Tensor order) -> Tensor",
    fake=lambda parts, order: parts.new_empty(parts.shape[1:]),
)
def combine_tokens(
    parts: Tensor,  # float [ranks, T, H]
    order: Tensor,  # int32 [ranks, T]
) -> Tensor:  # float [T, H]
    """What ranks made of the tokens that `dispatch_tokens` gave them, summed by token.

    In float32 or wider, in the order of ranks, whatever the number of tokens.
    """
    back = order.long().argsort(dim=1)  # int64 [ranks, T]: the place of each token
    dtype = torch.promote_types(parts.dtype, torch.float32)
    total = torch.zeros(parts.shape[1:], dtype=dtype, device=parts.device)
    for part, place in zip(parts, back, strict=True):
        total += part.index_select(0, place)
    return total.to(parts.dtype)
