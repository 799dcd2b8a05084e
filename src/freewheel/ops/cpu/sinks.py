# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks, row by row: neighbouring queries share nearly all of their keys.

The distinct keys of a few queries are gathered once, and each query is kept from those that are not
its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

import freewheel.ops.sinks  # noqa: F401 - declares what this file implements
from freewheel.ops.dense import wide
from freewheel.ops.registry import implement

QUERY_PIECE = 64
"""Queries of one row whose keys are gathered together."""


@implement("sink_attention", "cpu")
def sink_attention(
    query: Tensor,
    keys: Tensor,
    slots: Tensor,
    entries: Tensor,
    entry_slots: Tensor,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for b in range(query.shape[0]):
        for at in range(0, query.shape[1], QUERY_PIECE):
            piece = slice(at, at + QUERY_PIECE)
            parts = [_distinct(keys, slots[b, piece]), _distinct(entries, entry_slots[b, piece])]
            values = torch.cat([rows for rows, _ in parts])  # [U, D]
            seen = torch.cat([own for _, own in parts], dim=1)  # bool [w, U]
            output[b, piece] = _attend(wide(query[b, piece]), values, seen, sinks, scale)
    return output


def _distinct(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [U, D] of the cache that some lane of slots [w, K] names; bool [w, U]: which query's."""
    flat = cache.view(-1, cache.shape[2])
    if slots.shape[0] == 1:
        own = slots[slots >= 0]
        return wide(flat.index_select(0, own)), torch.ones(1, own.shape[0], dtype=torch.bool)
    distinct, lane = slots.unique(return_inverse=True)  # ascending, so -1 is the first if any
    seen = torch.zeros(slots.shape[0], distinct.shape[0], dtype=torch.bool)
    seen.scatter_(1, lane.view(slots.shape), True)
    first = int(distinct.shape[0] > 0 and int(distinct[0]) < 0)
    return wide(flat.index_select(0, distinct[first:])), seen[:, first:]


def _attend(query: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """query [w, H, D], keys [U, D] -> [w, H, D]"""
    keys = keys.to(query.dtype)
    scores = (query @ keys.T).mul_(scale)  # [w, H, U]
    scores.masked_fill_(~seen[:, None], float("-inf"))
    sink = sinks.to(scores.dtype)[None, :, None].expand(scores.shape[0], -1, 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    return weights @ keys
