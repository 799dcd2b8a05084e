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
from tests.ops.quantised_cases import block_scaled
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


def _shared_products(of: Sizes, parts: int = 2) -> tuple[Any, ...]:
    """FP8, plain and float32 rows of 384 inputs: the last part has half of what the first has."""
    weight, scale = block_scaled(of.seed, 192, 384)
    plain, gates = of.draw(2, 40, 384), of.draw(3, 9, 384, dtype=of.wide)
    return of.draw(1, *of.lead, 384), weight, scale, plain / 20, gates / 20, parts


def _place_inputs(of: Sizes, kinds: int = 2, ratio: int = RATIO) -> tuple[Any, ...]:
    """Latents of 40 elements, keys of 24, and so many kinds of entries, of 24 and 8 channels."""
    windows = 1 if ratio != RATIO else 2
    entries, raw, values, positions, slots, bias, weight, eps, table, *planned = _store_entries(
        of, ratio, windows
    )
    columns = 40 + 24 + 5
    own: tuple[Any, ...] = ()
    if kinds:
        columns += values.shape[-1]
        own = (entries, raw, bias, weight)
    if kinds == 2:
        small = 2 * 8 * windows
        columns += small
        index_raw = of.draw(21, *raw.shape[:2], small, dtype=of.wide)
        index = of.draw(22, *entries.shape[:2], 8)
        own += (index, index_raw, bias[:, : small // 2].contiguous(), weight[:8].contiguous())
    elif kinds:
        own += (None,) * 4
    products = of.draw(23, 3, *of.lead, columns, dtype=of.wide)
    keys = torch.zeros(raw.shape[0], raw.shape[1], 24, dtype=of.dtype)
    lead = (products, of.dtype, keys, of.draw(24, 40, dtype=of.wide), weight, eps)
    call = (*lead, positions, table, slots, 0.3, *own)
    return (*call, slots, *planned) if kinds else call


def _open_queries(of: Sizes, index_heads: int = 3) -> tuple[Any, ...]:
    positions, table = _stream("rope_tail", of)[1:3]
    joined = of.draw(9, *of.lead, 2 * 24 + index_heads * 10)
    return joined, 24, 1e-6, index_heads, 10, positions, table


STEP_CASES: dict[str, Callable[[Sizes], tuple[Any, ...]]] = {
    "hyper_cross": _hyper_cross,
    "hyper_enter": _hyper_enter,
    "open_queries": _open_queries,
    "place_heads": _place_heads,
    "place_inputs": _place_inputs,
    "shared_products": _shared_products,
    "store_entries": _store_entries,
    "window_attention": _window_attention,
}
HEAVY_CASES: dict[str, Callable[[Sizes], tuple[Any, ...]]] = {
    "open_queries": lambda of: _open_queries(of, 0),
    "place_inputs": lambda of: _place_inputs(of, 1, 8),
    "shared_products": lambda of: (
        *_shared_products(of)[:1], _shared_products(of)[3], None, None, None, 1
    ),
    "store_entries": lambda of: _store_entries(of, 8, 1),
}  # fmt: skip
"""Entries that do not overlap, queries without an indexer's, and one weight alone."""

WINDOW_CASES: dict[str, Callable[[Sizes], tuple[Any, ...]]] = {
    "place_inputs": lambda of: _place_inputs(of, 0)
}
"""Layers that see their window alone."""


def results(name: str, body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What a call returns, and the caches that it writes, but for their scratch pages."""
    own = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    result = body(*own)
    returned = () if result is None else result if isinstance(result, tuple) else (result,)
    written = {"place_heads": (0,), "store_entries": (0, 1), "place_inputs": (2, 10, 11, 14, 15)}
    caches = [own[at] for at in written.get(name, ()) if at < len(own) and own[at] is not None]
    return (*returned, *(cache[1:] for cache in caches))
