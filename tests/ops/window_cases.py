# SPDX-License-Identifier: Apache-2.0
"""Arguments of attention over windows and entries at the sizes of DeepSeek-V4's heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freewheel.ops.rows import write_keys
from tests.ops.cases import draw, generator, rope_angles
from tests.ops.packed_cases import KEY, KEY_BYTES, ROPE, poisoned, spread

SCALE = 0.003
ROWS = 600
"""Of each cache."""


def lists(seed: int, queries: int, count: int) -> Tensor:
    """Slots int32 [1, queries, count], none twice in a query, a third of the lanes dead."""
    chance = generator(seed)
    picked = torch.stack([torch.randperm(ROWS, generator=chance)[:count] for _ in range(queries)])
    dead = torch.rand(queries, count, generator=chance) < 1 / 3
    return picked.masked_fill(dead, -1).int()[None]


def cache_of(seed: int, page_rows: int, slots: Tensor, packed: bool) -> Tensor:
    """Pages of keys in bfloat16 or packed; rows that `slots` do not name are of NaN."""
    values = spread(draw(seed, ROWS // page_rows, page_rows, KEY)).bfloat16()
    listed = slots[slots >= 0].unique().long()
    if packed:
        cache = torch.full((*values.shape[:2], KEY_BYTES), 255, dtype=torch.uint8)
        write_keys(cache, values, torch.arange(ROWS).view(values.shape[:2]), ROPE)
        return poisoned(cache, listed)
    unlisted = torch.ones(ROWS, dtype=torch.bool)
    unlisted[listed] = False
    values.view(ROWS, KEY)[unlisted] = torch.nan
    return values


def window_call(
    heads: int, lanes: int, picks: int, packed: bool, queries: int = 4
) -> tuple[Any, ...]:
    """Of one row: query 1 has lanes in a few tiles only, query 2 none at all, query 3 no entry."""
    own, more = lists(1, queries, lanes), lists(2, queries, picks)
    own[0, 1 % queries, 64:] = -1
    more[0, 1 % queries, 64:128] = -1
    if queries > 2:
        own[0, 2], more[0, 2], more[0, 3:] = -1, -1, -1
    query = draw(3, 1, queries, heads, KEY).bfloat16()
    positions = torch.arange(queries, dtype=torch.int32)[None] * 7 % 50
    sinks = draw(4, heads) * 2
    keys, entries = cache_of(5, 6, own, packed), cache_of(6, 2, more, packed)
    return query, keys, own, entries, more, sinks, SCALE, positions, rope_angles(50, ROPE)


def widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with what is bfloat16 in float64, for the specification."""
    return tuple(
        a.double() if isinstance(a, Tensor) and a.dtype == torch.bfloat16 else a for a in args
    )
