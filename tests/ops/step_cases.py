# SPDX-License-Identifier: Apache-2.0
"""Arguments of one valid call of each op that joins others, and what such a call gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import Sizes, draw_pages, rope_angles
from tests.ops.stream_cases import RATIO, STREAM_CASES, rectangle


def _stream(name: str, of: Sizes) -> tuple[Any, ...]:
    return STREAM_CASES[name](name, of)


def _hyper_enter(of: Sizes) -> tuple[Any, ...]:
    return (*_stream("hyper_open", of), of.draw(7, 16, dtype=of.wide), 1e-6)


def _hyper_cross(of: Sizes) -> tuple[Any, ...]:
    return (*_stream("hyper_close", of), *_hyper_enter(of)[1:])


def _place_heads(of: Sizes) -> tuple[Any, ...]:
    cache, key, weight, eps, positions, table, slots = _stream("store_key", of)
    return cache, of.draw(8, *of.lead, 2, 24), 1e-5, key, weight, eps, positions, table, slots


def _window_attention(of: Sizes) -> tuple[Any, ...]:
    positions, table = _stream("rope_tail", of)[1:3]
    return (*_stream("sink_attention", of), positions, table)


def _store_entries(of: Sizes, ratio: int = RATIO, windows: int = 2) -> tuple[Any, ...]:
    """Rows that stand somewhere within 40 tokens, in pages of 4; entries of 24 channels."""
    dim, span = 24, windows * ratio
    pages = draw_pages(of.seed, of.batch, of.width, columns=40, size=1)
    raw_pages = draw_pages(of.seed + 1, of.batch, of.width, columns=10, size=4)
    raw_pages = replace(raw_pages, rows=pages.rows)
    positions, kv_lens = rectangle(of, 40)
    slots = torch.zeros(of.lead, dtype=torch.int64)
    for b in range(of.batch):
        live = kv_lens[b] > 0
        slots[b, live] = raw_pages.slots_of(b, positions[b, live].long())
    planned = SPECIFICATIONS["plan_closings"](
        positions, kv_lens, pages.rows, raw_pages.table, pages.table, 4, 1, ratio, span
    )
    channels = windows * dim
    raw = of.draw(1, raw_pages.count, 4, 2 * channels, dtype=of.wide)
    values = of.draw(2, *of.lead, 2 * channels, dtype=of.wide)
    bias, weight = of.draw(3, ratio, channels, dtype=of.wide), of.draw(4, dim, dtype=of.wide)
    cache, table = of.draw(5, pages.count, 1, dim), rope_angles(50, 8)
    return cache, raw, values, positions, slots, bias, weight, 1e-6, table, *planned


STEP_CASES: dict[str, Callable[[Sizes], tuple[Any, ...]]] = {
    "hyper_cross": _hyper_cross,
    "hyper_enter": _hyper_enter,
    "place_heads": _place_heads,
    "store_entries": _store_entries,
    "window_attention": _window_attention,
}
HEAVY_CASES: dict[str, Callable[[Sizes], tuple[Any, ...]]] = {
    "store_entries": lambda of: _store_entries(of, 8, 1)
}
"""Entries that do not overlap."""


def results(name: str, body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What a call returns, and the caches that it writes, but for their scratch pages."""
    own = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    result = body(*own)
    returned = () if result is None else result if isinstance(result, tuple) else (result,)
    written = {"place_heads": 1, "store_entries": 2}.get(name, 0)
    return (*returned, *(cache[1:] for cache in own[:written]))
