# SPDX-License-Identifier: Apache-2.0
"""Arguments of one valid call of each op that DeepSeek-V4 adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import Sizes, draw_pages, draw_slots, generator, rope_angles

RATIO = 4


def _positions(of: Sizes) -> Tensor:
    return torch.randint(0, 50, of.lead, generator=generator(of.seed), dtype=torch.int32)


def _slots(of: Sizes, count: int) -> Tensor:
    chosen = torch.randperm(count, generator=generator(of.seed))[: of.batch * of.width]
    return chosen.view(of.lead)


def _keys(name: str, of: Sizes) -> tuple[Any, ...]:
    query, table = of.draw(1, *of.lead, 2, 24), rope_angles(50, 8)
    if name == "rope_tail":
        return query, _positions(of), table, of.seed % 2 == 0
    if name == "open_query":
        return query, 1e-6, _positions(of), table
    if name == "project_raw":
        return query[:, :, 0], of.draw(5, 10, 24)
    cache, key, slots = of.draw(2, 10, 4, 24), of.draw(3, *of.lead, 24), _slots(of, 40)
    if name == "store_raw":
        return cache, key, slots
    return cache, key, of.draw(4, 24), 1e-6, _positions(of), table, slots


def rectangle(of: Sizes, longest: int) -> tuple[Tensor, Tensor]:
    """positions and kv_lens, int32 [B, W]: each row somewhere, with 0 to W queries."""
    chance = generator(of.seed)
    start = torch.randint(0, longest - of.width + 1, (of.batch, 1), generator=chance)
    lens = torch.randint(0, of.width + 1, (of.batch, 1), generator=chance)
    column = torch.arange(of.width)
    positions = torch.where(column < lens, start + column, 0).int()
    return positions, torch.where(column < lens, positions + 1, 0).int()


def _slots_of(name: str, of: Sizes) -> tuple[Any, ...]:
    pages = draw_pages(of.seed, of.batch, of.width, columns=5, size=8)
    if name == "window_slots":
        return pages.table, pages.rows, pages.kv_lens, 8, 6
    if name == "entry_slots":
        return pages.table, pages.rows, pages.kv_lens // RATIO, 2
    raw = draw_pages(of.seed + 1, of.batch, of.width, columns=10, size=4)
    return (*rectangle(of, 40), pages.rows, raw.table, pages.table, 4, 2, RATIO, 2 * RATIO)


def _compress(name: str, of: Sizes) -> tuple[Any, ...]:
    pages = draw_pages(of.seed, of.batch, of.width, columns=5, size=8)
    raw_slots = draw_slots(of.seed, pages, 2 * RATIO, of.width)
    raw_slots[..., -1] = raw_slots[..., -1].abs()
    windows = torch.randint(-1, 12, of.lead, generator=generator(of.seed), dtype=torch.int32)
    raw_slots = raw_slots.masked_fill(windows[..., None] < 0, -1)
    cache, raw = of.draw(1, 10, 4, 24), of.draw(2, pages.count, 8, 96, dtype=of.wide)
    cache[0, 0] = 0
    bias, norm = of.draw(3, RATIO, 48, dtype=of.wide), of.draw(4, 24, dtype=of.wide)
    table = rope_angles(50, 8)
    write_slots = (_slots(of, 39) + 1).masked_fill(windows < 0, 0)
    return cache, raw, bias, norm, 1e-6, table, windows, write_slots, raw_slots


def distinct(slots: Tensor) -> Tensor:
    """The same lanes, but for those that repeat an earlier one of their query: they are dead."""
    same = slots[..., None] == slots[..., None, :]
    return slots.masked_fill(same.tril(-1).any(-1), -1)


def _sinks(name: str, of: Sizes) -> tuple[Any, ...]:
    pages = draw_pages(of.seed, of.batch, of.width, columns=5, size=8)
    more = draw_pages(of.seed + 1, of.batch, of.width, columns=5, size=2)
    slots = distinct(draw_slots(of.seed, pages, 6, of.width))
    picks = distinct(draw_slots(of.seed + 1, more, 3, of.width))
    keys, entries = of.draw(1, pages.count, 8, 24), of.draw(2, more.count, 2, 24)
    query, sinks = of.draw(3, *of.lead, 4, 24), of.draw(4, 4, dtype=of.wide)
    return query, keys, slots, entries, picks, sinks, 0.2


def _hyper(name: str, of: Sizes) -> tuple[Any, ...]:
    streams = of.draw(1, *of.lead, 2, 16)
    if name == "hyper_close":
        post, mix = (
            of.draw(2, *of.lead, 2, dtype=of.wide),
            of.draw(3, *of.lead, 2, 2, dtype=of.wide),
        )
        return of.draw(4, *of.lead, 16), streams, post, mix
    count, scales = (8, 3) if name == "hyper_open" else (2, 1)
    weight, base = of.draw(2, count, 32, dtype=of.wide), of.draw(3, count, dtype=of.wide)
    scale = of.draw(4, scales, dtype=of.wide)
    tail = (20,) if name == "hyper_open" else ()
    return streams, weight, base, scale, 1e-6, 1e-6, *tail


def _moe(name: str, of: Sizes) -> tuple[Any, ...]:
    x, logits = of.draw(1, *of.lead, 32), of.draw(2, *of.lead, 6, dtype=of.wide)
    ids = torch.rand((*of.lead, 6), generator=generator(of.seed)).argsort(-1)[..., :2].int()
    weights = of.draw(3, *of.lead, 2, dtype=of.wide)
    if name == "route_best":
        return logits, of.draw(4, 6, dtype=of.wide), 2, 1.5
    if name == "route_by_token":
        table = torch.rand((50, 6), generator=generator(of.seed)).argsort(-1)[:, :2].int()
        return logits, table, _positions(of), 1.5
    if name == "clamped_silu_mul":
        return x, 0.7
    return x, of.draw(5, 6, 16, 32), of.draw(6, 6, 32, 8), ids, weights, 0.7


BUILDERS: dict[str, Callable[[str, Sizes], tuple[Any, ...]]] = {
    "freewheel.ops.clamped": _moe,
    "freewheel.ops.hyper": _hyper,
    "freewheel.ops.sinks": _sinks,
}
STREAM_CASES: dict[str, Callable[[str, Sizes], tuple[Any, ...]]] = {
    **{
        name: BUILDERS[b.__module__]
        for name, b in SPECIFICATIONS.items()
        if b.__module__ in BUILDERS
    },
    **dict.fromkeys(("rope_tail", "open_query", "store_key", "project_raw", "store_raw"), _keys),
    **dict.fromkeys(("window_slots", "entry_slots", "plan_closings"), _slots_of),
    "compress": _compress,
}
