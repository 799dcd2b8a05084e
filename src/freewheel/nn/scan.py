# SPDX-License-Identifier: Apache-2.0
"""An index scan that ranks share: each scores some pages, and all choose among the best of each.

Pages are dealt in turn, so a row of any length is shared evenly to within a page. The best of all
keys are among the best of each rank's, so candidates decide exactly what all scores would: also
where scores are equal, as every rank keeps the lowest positions of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel import ops
from freewheel.nn.rows import IndexKeys
from freewheel.spec.mesh import LAYER_RANKS, Share

NOWHERE = torch.iinfo(torch.int32).max
"""The position of a candidate that is none: behind all others."""


def own_pages(table: Tensor, scan: Share) -> Tensor:
    """int32 [R, columns] of table [R, P]: every `scan.count`-th page.

    Ranks have as many columns each: the last is one of scratch where it is past the table.
    """
    columns = -(-table.shape[1] // scan.count)
    own = table[:, scan.index :: scan.count]
    return torch.nn.functional.pad(own, (0, columns - own.shape[1]))


def own_lens(lens: Tensor, page_rows: int, scan: Share) -> Tensor:
    """int32, as lens: how many of a row's first `lens` keys lie on this rank's pages."""
    whole, rest = lens // page_rows, lens % page_rows
    pages = (whole - scan.index + scan.count - 1) // scan.count  # those that are full
    last = torch.where(whole % scan.count == scan.index, rest, 0)
    return (pages * page_rows + last).to(lens.dtype)


def own_candidates(
    query: Tensor,  # [B, W, Hi, Di]
    gates: Tensor,  # float [B, W, Hi]
    keys: IndexKeys,
    own_table: Tensor,  # int32 [R, columns]
    rows: Tensor,  # int32 [B]
    lens: Tensor,  # int32 [B, W]  of whole rows
    topk: int,
    scan: Share,
) -> tuple[Tensor, Tensor]:  # float [B, W, topk], int32 [B, W, topk]
    """Scores and positions of the best keys on this rank's pages; -inf and NOWHERE behind them."""
    page_rows, own = keys.page_rows, own_lens(lens, keys.page_rows, scan)
    logits = keys.logits(query, gates, own_table, rows, own, 0)  # [B, W, columns * page_rows]
    places = _best(logits, own, page_rows, topk)
    score = logits.gather(2, places.clamp(min=0).long())
    column = places // page_rows * scan.count + scan.index
    positions = column * page_rows + places % page_rows
    none = places < 0
    score = torch.where(score.isnan() | none, float("-inf"), score)
    return score, positions.masked_fill(none, NOWHERE)


def merge_candidates(
    score: Tensor,  # float [B, W, topk]
    positions: Tensor,  # int32 [B, W, topk]
    table: Tensor,  # int32 [R, P]
    rows: Tensor,  # int32 [B]
    page_rows: int,
    topk: int,
    scan: Share,
) -> Tensor:  # int32 [B, W, topk]
    """Slots of the best of all ranks' candidates, by ascending position, then -1."""
    words = score.view(torch.int32)  # [B, W, topk], or twice as many of float64
    sent = torch.cat((words, positions), dim=-1)
    every = ops.all_gather(sent, scan.count, LAYER_RANKS)
    apart = every.unflatten(-1, (scan.count, -1)).split((words.shape[-1], topk), dim=-1)
    scores, places = (part.flatten(2) for part in apart)  # [B, W, ranks * topk] each
    places, order = places.sort(dim=-1)
    scores = scores.contiguous().view(score.dtype).gather(2, order)
    found = (places < NOWHERE).sum(-1, dtype=torch.int32)  # [B, W]
    best = _best(scores, found, topk, topk)  # int32 [B, W, topk]
    position = places.gather(2, best.clamp(min=0).long()).masked_fill(best < 0, 0)
    page = table.index_select(0, rows).gather(1, (position // page_rows).flatten(1).long())
    slots = page.view_as(position) * page_rows + position % page_rows
    return slots.int().masked_fill(best < 0, -1)


def _best(logits: Tensor, lens: Tensor, page_rows: int, topk: int) -> Tensor:
    """int32 [B, W, topk]: the best places of logits [B, W, S] below lens [B, W], as `topk_slots`
    picks them, where every row's pages are 0, 1, 2, .."""
    batch, columns = logits.shape[0], logits.shape[2] // page_rows
    table = torch.arange(columns, dtype=torch.int32, device=logits.device)[None]
    rows = torch.zeros(batch, dtype=torch.int32, device=logits.device)
    return ops.topk_slots(logits, table, rows, lens, page_rows, topk)
