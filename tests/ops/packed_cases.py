# SPDX-License-Identifier: Apache-2.0
"""Small inputs for the ops over packed caches, and what the bytes of a cache stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS
from freewheel.ops.rows import (
    parts_of,
    read_index_pages,
    read_keys,
    read_latents,
    write_index_keys,
    write_keys,
    write_latents,
)
from tests.ops.cases import Sizes, draw, draw_pages, draw_slots, generator, rope_angles
from tests.ops.stream_cases import distinct, rectangle

RANK, ROPE, DIM, KEY = 512, 64, 128, 512
LATENT_BYTES, INDEX_BYTES, KEY_BYTES = 656, 132, 584
PAGE = 4


def spread(x: Tensor) -> Tensor:
    """The same numbers at very different sizes, tile by tile."""
    sizes = torch.exp2(torch.arange(x.shape[-1]) // 64 * 5 % 13 - 6.0)
    return x * sizes.to(x.dtype)


def empty(count: int, width: int) -> Tensor:
    """Pages full of NaN, whatever they are read as."""
    return torch.full((count, PAGE, width), 255, dtype=torch.uint8)


def filled(name: str, seed: int, count: int) -> Tensor:
    """Pages of random rows: "latents", "index" or "keys"."""
    width, size, write = {
        "latents": (LATENT_BYTES, RANK + ROPE, lambda c, x, s: write_latents(c, x, s, ROPE)),
        "index": (INDEX_BYTES, DIM, write_index_keys),
        "keys": (KEY_BYTES, KEY, lambda c, x, s: write_keys(c, x, s, ROPE)),
    }[name]
    cache = empty(count, width)
    write(cache, spread(draw(seed, count, PAGE, size)), torch.arange(count * PAGE).view(count, -1))
    return cache


def numbers(cache: Tensor) -> Tensor:
    """float64 [rows, n]: what every row of a cache stands for."""
    every = torch.arange(cache.shape[0] * cache.shape[1])
    if cache.shape[2] == LATENT_BYTES:
        return read_latents(cache, every, RANK, torch.float64)
    if cache.shape[2] == KEY_BYTES:
        return read_keys(cache, every, KEY, ROPE, torch.float64)
    pages = torch.arange(cache.shape[0])
    return read_index_pages(cache, pages, torch.float64).flatten(0, 1)


def _places(of: Sizes, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """positions int32 [B, W], rope table [50, 64], slots int64 [B, W]"""
    chance = generator(of.seed)
    positions = torch.randint(0, 50, of.lead, generator=chance, dtype=torch.int32)
    slots = torch.randperm(rows, generator=chance)[: of.batch * of.width].view(of.lead)
    return positions, rope_angles(50, ROPE), slots


def _latents(name: str, of: Sizes) -> tuple[Any, ...]:
    if name == "fp8_sparse_mla":
        pages = draw_pages(of.seed, of.batch, of.width, columns=5, size=PAGE)
        slots = draw_slots(of.seed, pages, 7, of.width)
        query = of.draw(5, *of.lead, 3, RANK + ROPE)
        return query, filled("latents", of.seed, pages.count), slots, 0.02, RANK
    positions, table, slots = _places(of, 40)
    norm = of.draw(3, RANK)
    query, compressed = of.draw(2, *of.lead, 40), of.draw(4, *of.lead, RANK + ROPE)
    cache, place = empty(10, LATENT_BYTES), (positions, table, of.seed % 2 == 0, slots)
    return cache, query, norm[:40], spread(compressed), norm, 1e-6, *place


def _index(name: str, of: Sizes) -> tuple[Any, ...]:
    if name == "fp8_index_logits":
        pages = draw_pages(of.seed, of.batch, of.width, columns=5, size=PAGE)
        query, gates = of.draw(1, *of.lead, 3, DIM), of.draw(2, *of.lead, 3, dtype=of.wide)
        keys = filled("index", of.seed, pages.count)
        return query, gates, keys, pages.table, pages.rows, pages.kv_lens
    positions, table, slots = _places(of, 40)
    query, gates = of.draw(1, *of.lead, 3, DIM), of.draw(2, *of.lead, 3, dtype=of.wide)
    norm, key = of.draw(3, DIM), of.draw(4, *of.lead, DIM)
    cache, place = empty(10, INDEX_BYTES), (positions, table, of.seed % 2 == 0, slots)
    call = (cache, query, gates, 0.3, key, norm, norm.flip(0), 1e-6, *place)
    if name == "fp8_place_queries":
        return *call, of.draw(5, *of.lead, 6, 24 + ROPE), of.draw(6, 6, 24, 40), of.seed % 2 == 1
    return call


def _keys(name: str, of: Sizes) -> tuple[Any, ...]:
    positions, table, slots = _places(of, 40)
    query = of.draw(1, *of.lead, 2, KEY)
    if name == "fp8_window_attention":
        pages = draw_pages(of.seed, of.batch, of.width, columns=5, size=PAGE)
        more = draw_pages(of.seed + 1, of.batch, of.width, columns=2, size=PAGE)
        return (
            query,
            filled("keys", of.seed, pages.count),
            distinct(draw_slots(of.seed, pages, 7, of.width)),
            filled("keys", of.seed + 1, more.count),
            distinct(draw_slots(of.seed + 1, more, 3, of.width)),
            of.draw(7, 2, dtype=of.wide),
            0.02,
            positions,
            table,
        )
    key, norm = spread(of.draw(3, *of.lead, KEY)), of.draw(4, KEY)
    return empty(10, KEY_BYTES), query, 1e-6, key, norm, 1e-6, positions, table, slots


def _entries(name: str, of: Sizes) -> tuple[Any, ...]:
    """Windows of four tokens that overlap with the one before."""
    dim, width = (KEY, KEY_BYTES) if name == "fp8_store_entries" else (DIM, INDEX_BYTES)
    pages = draw_pages(of.seed, of.batch, of.width, columns=5, size=8)
    raw = draw_pages(of.seed + 1, of.batch, of.width, columns=10, size=4)
    positions, lens = rectangle(of, 40)
    planned = SPECIFICATIONS["plan_closings"](
        positions, lens, pages.rows, raw.table, pages.table, 4, PAGE, 4, 8
    )
    tables = raw.table.index_select(0, pages.rows)
    at = positions.long()
    slots = tables.long().gather(1, at // 4) * 4 + at % 4
    slots = slots.masked_fill(lens == 0, 0)
    cache = empty(pages.count, width)
    kept, values = of.draw(1, raw.count, 4, 4 * dim, dtype=of.wide), of.draw(2, *of.lead, 4 * dim)
    bias, norm = of.draw(3, 4, 2 * dim, dtype=of.wide), of.draw(4, dim)
    values = values.to(of.wide)
    table = rope_angles(50, ROPE)
    return cache, kept, values, positions, slots, bias, norm, 1e-6, table, *planned


PACKED_CASES: dict[str, Callable[[str, Sizes], tuple[Any, ...]]] = {
    **dict.fromkeys(("fp8_norm_latents", "fp8_sparse_mla"), _latents),
    **dict.fromkeys(("fp8_index_queries", "fp8_place_queries", "fp8_index_logits"), _index),
    **dict.fromkeys(("fp8_place_heads", "fp8_window_attention"), _keys),
    **dict.fromkeys(("fp8_store_entries", "fp8_store_index_entries"), _entries),
}
"""Arguments of one valid call of each op."""

STORES = (
    "fp8_norm_latents",
    "fp8_index_queries",
    "fp8_place_queries",
    "fp8_place_heads",
    "fp8_store_entries",
    "fp8_store_index_entries",
)
"""Those that write packed rows, into their first argument."""


def poisoned(cache: Tensor, slots: Tensor) -> Tensor:
    """A copy in which only the rows at `slots` are left; every other byte is of NaN."""
    widths = {
        LATENT_BYTES: (LATENT_BYTES,),
        INDEX_BYTES: (DIM, 4),
        KEY_BYTES: (KEY_BYTES - 8, 8),
    }[cache.shape[2]]
    copy, rows = torch.full_like(cache, 255), cache.shape[1]
    page, row = slots // rows, slots % rows
    for own, other in zip(parts_of(copy, *widths), parts_of(cache, *widths), strict=True):
        own[page, row] = other[page, row]
    return copy
