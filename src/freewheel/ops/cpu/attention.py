# SPDX-License-Identifier: Apache-2.0
"""Sparse attention that touches only live pages, in pieces that stay in a core's cache.

Pieces are runs of whole queries: a query's result does not depend on where a piece ends.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from freewheel.ops.attention import slots_at
from freewheel.ops.dense import wide
from freewheel.ops.registry import implement

KEY_PIECE = 1024
"""Index keys gathered at once, in whole pages: few enough to stay in cache for all queries."""

QUERY_PIECE = 64
"""Queries scored at once, up to the longest of their lengths."""

SELECT_PIECE = 32
"""Queries whose best positions are looked for together, up to the longest of their lengths."""

GATHER_PIECE = 160 << 10
"""Elements of gathered keys held at once, unless a single query needs more."""


@implement("index_logits", "cpu")
def index_logits(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    skip: int = 0,
) -> Tensor:
    dtype, page_size = head_weights.dtype, index_keys.shape[1]
    shape = (*query.shape[:2], page_table.shape[1] * page_size)
    if skip and int(kv_lens.max()) <= skip:
        return torch.empty(shape, dtype=dtype)
    logits = torch.full(shape, float("-inf"), dtype=dtype)
    query, step = query.to(dtype), max(1, KEY_PIECE // page_size)
    for b, (row, lens) in enumerate(zip(rows.tolist(), kv_lens.tolist(), strict=True)):
        live = page_table[row, : -(-max(lens) // page_size)]
        for at in range(0, live.shape[0], step):
            keys = index_keys.index_select(0, live[at : at + step]).flatten(0, 1).to(dtype)
            first = at * page_size
            part = logits[b, :, first : first + keys.shape[0]]
            _score(part, query[b], head_weights[b], keys, [length - first for length in lens])
    return logits


def _score(
    logits: Tensor, query: Tensor, head_weights: Tensor, keys: Tensor, lens: list[int]
) -> None:
    """Fill logits [W, n] of query [W, Hi, Di] with weights [W, Hi] over keys [n, Di] below lens."""
    for at in range(0, query.shape[0], QUERY_PIECE):
        piece = slice(at, at + QUERY_PIECE)
        longest, shortest = min(max(lens[piece]), keys.shape[0]), max(min(lens[piece]), 0)
        if longest <= 0:
            continue
        scores = (query[piece].flatten(0, 1) @ keys[:longest].T).relu_()  # [w * Hi, n]
        per_head = scores.view(-1, query.shape[1], longest)
        summed = torch.bmm(head_weights[piece, None], per_head)[:, 0]  # [w, n]
        if shortest < longest:
            beyond = torch.arange(shortest, longest) >= torch.tensor(lens[piece])[:, None]
            summed[:, shortest:].masked_fill_(beyond, float("-inf"))
        logits[piece, :longest] = summed


@implement("topk_slots", "cpu")
def topk_slots(
    logits: Tensor, page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, k: int
) -> Tensor:
    lens, flat = kv_lens.flatten(), logits.flatten(0, 1)  # int32 [N], float [N, S], N = B * W
    if max(bounds := lens.tolist(), default=0) <= k:
        positions = torch.arange(k).expand(lens.shape[0], k)
    else:
        step = SELECT_PIECE
        pieces = [slice(at, at + step) for at in range(0, len(bounds), step)]
        positions = torch.cat([_best(flat[p], lens[p], bounds[p], k) for p in pieces])
    slots = slots_at(positions.view(*kv_lens.shape, k), page_table.index_select(0, rows), page_size)
    return slots.masked_fill_((positions >= lens[:, None]).view_as(slots), -1)


def _best(logits: Tensor, lens: Tensor, bounds: list[int], k: int) -> Tensor:
    """int64 [N, k]: the k best positions of logits [N, S] below lens [N], ascending.

    `bounds` holds the same numbers as `lens`. Where that is at most k: positions 0 .. k - 1.
    """
    longest, first = max(bounds), torch.arange(k).expand(len(bounds), k)
    if longest <= k:
        return first
    ranked = logits[:, :longest]
    if min(bounds) < longest:
        ranked = ranked.masked_fill(torch.arange(longest) >= lens[:, None], float("-inf"))
    values, order = ranked.topk(k + 1, dim=-1)
    if _is_ambiguous(values[:, 0].tolist(), values[:, k - 1 :].tolist(), bounds, k):
        positions = _best_with_ties(ranked, k)
    else:
        positions = order[:, :k].sort(dim=-1).values
    return positions if min(bounds) > k else torch.where(lens[:, None] > k, positions, first)


def _is_ambiguous(
    highest: list[float], edges: list[list[float]], bounds: list[int], k: int
) -> bool:
    """Whether the k best follow from `topk` alone.

    They do not where the last value that is in equals the first one that is out, nor with NaN,
    which `topk` ranks first.
    """
    cases = zip(highest, edges, bounds, strict=True)
    return any(bound > k and (math.isnan(top) or last == out) for top, (last, out), bound in cases)


def _best_with_ties(ranked: Tensor, k: int) -> Tensor:
    ranked = ranked.masked_fill(ranked.isnan(), float("-inf"))
    threshold = ranked.topk(k, dim=-1).values[:, k - 1 :]
    above, level = ranked > threshold, ranked == threshold
    level &= level.cumsum(-1) <= k - above.sum(-1, keepdim=True)
    return (above | level).nonzero()[:, 1].view(-1, k)


@implement("sparse_mla", "cpu")
def sparse_mla(
    query: Tensor,
    latent: Tensor,
    slots: Tensor,
    scale: float,
    value_dim: int,
    fixed: bool = False,
    page_table: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    del fixed, page_table, rows  # a query is one piece always, and reads its own keys
    flat = latent.view(-1, latent.shape[2])
    queries, lanes = query.flatten(0, 1), slots.flatten(0, 1)  # [N, H, D], [N, K]
    output = query.new_empty((*queries.shape[:2], value_dim))
    step = max(1, GATHER_PIECE // (lanes.shape[1] * flat.shape[1]))
    for at in range(0, queries.shape[0], step):
        piece = slice(at, at + step)
        output[piece] = _attend(wide(queries[piece]), flat, lanes[piece], scale, value_dim)
    return output.view(*query.shape[:3], value_dim)


def _attend(query: Tensor, flat: Tensor, slots: Tensor, scale: float, value_dim: int) -> Tensor:
    """query [N, H, D], flat [n_slots, D], slots [N, K] -> [N, H, value_dim]"""
    if int(slots.min()) >= 0:
        keys = _gather(flat, slots, query.dtype)
        scores = torch.bmm(query, keys.transpose(1, 2)).mul_(scale)  # [N, H, K]
        return torch.bmm(scores.softmax(-1), keys[:, :, :value_dim])
    # A dead lane reads one of the query's live keys, and gives it no weight.
    stand_in, dead = slots.amax(1, keepdim=True), slots < 0
    keys = _gather(flat, torch.where(dead, stand_in, slots).clamp_(min=0), query.dtype)
    scores = torch.bmm(query, keys.transpose(1, 2)).mul_(scale)
    weights = scores.masked_fill_(dead[:, None], float("-inf")).softmax(-1)
    output = torch.bmm(weights, keys[:, :, :value_dim])
    return output.masked_fill_((stand_in < 0)[:, :, None], 0)


def _gather(flat: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    return flat.index_select(0, slots.flatten()).to(dtype).view(*slots.shape, flat.shape[1])
