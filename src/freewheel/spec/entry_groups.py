# SPDX-License-Identifier: Apache-2.0
"""The cache groups of models with compressed attention, and where each kind of layer finds its own.

Every group is an ordinary paged one. What a window's entry is mixed from lies in its `tail` group
by position, so a rejected draft's row is overwritten like any other, and nothing is ever cleared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from freewheel.errors import ConfigError
from freewheel.spec.cache import CacheField, CacheGroup
from freewheel.spec.compressed import CompressedSpec, LayerKind
from freewheel.spec.storage import RowStorage

WINDOW = 0
"""Index of the window's group among a model's cache groups."""

KEY = "key"
ENTRY = "entry"
INDEX_ENTRY = "index_entry"
RAW = "raw"
INDEX_RAW = "index_raw"

WINDOW_PAGE, SPARSE_TAIL_PAGE, HEAVY_TAIL_PAGE = 64, 16, 64
"""Tokens a page, at most, of groups that keep only the latest tokens: a page is freed whole."""


@dataclass(frozen=True)
class EntryPlaces:
    """One kind of entries: `ratio` tokens each, mixed from the last `span` of them.

    `entries` and `tail`: indices of their groups.
    """

    ratio: int
    span: int
    entries: int
    tail: int


def entry_places(spec: CompressedSpec) -> dict[LayerKind, EntryPlaces]:
    """Of each kind of entries that some layer has."""
    places: dict[LayerKind, EntryPlaces] = {}
    for kind, windows in ((LayerKind.SPARSE, 2), (LayerKind.HEAVY, 1)):
        if kind in spec.kinds:
            ratio, at = spec.ratio(kind), 1 + 2 * len(places)
            places[kind] = EntryPlaces(ratio, windows * ratio, at, at + 1)
    return places


def entry_groups(
    spec: CompressedSpec, page_size: int, wide: str, storage: RowStorage, mtp: bool
) -> tuple[CacheGroup, ...]:
    """The window's group; then, for each kind of entries, theirs and that of their raw inputs.

    A group keeps what a later round may read: of the window the last `window` tokens, of a tail
    the last `span`. Where a page of entries ends, every window has closed: a row that starts there
    needs of a tail only what the next windows overlap with. `wide`: dtype of raw rows; `storage`
    of all others.

    Raises ConfigError if a page would end within a window.
    """
    if page_size % spec.page_multiple:
        raise ConfigError(
            f"page_size: must be a multiple of {spec.page_multiple} for this model, got {page_size}"
        )
    layers = range(spec.layers + mtp)  # the multi-token-prediction layer is the last
    own = spec.attention
    key = storage.keys(KEY, own.head_dim, own.rope_dim, tuple(layers))
    window = _latest("window", page_size, WINDOW_PAGE, own.window, (key,))
    groups = [window]
    for kind, places in entry_places(spec).items():
        fields = _fields(spec, kind, wide, storage)
        name = f"compressed{places.ratio}"
        groups.append(CacheGroup(name, page_size, places.ratio, None, fields[:1] + fields[2:3]))
        largest = SPARSE_TAIL_PAGE if kind is LayerKind.SPARSE else HEAVY_TAIL_PAGE
        raw = fields[1:2] + fields[3:4]
        overlap = places.span - places.ratio
        groups.append(_latest(f"tail{places.ratio}", page_size, largest, places.span, raw, overlap))
    return tuple(groups)


def _latest(
    name: str,
    page_size: int,
    largest: int,
    retention: int,
    fields: tuple[CacheField, ...],
    resume: int | None = None,
) -> CacheGroup:
    """A group of rows by position that keeps the last `retention` of them."""
    return CacheGroup(name, math.gcd(page_size, largest), 1, retention, fields, resume)


def _fields(
    spec: CompressedSpec, kind: LayerKind, wide: str, storage: RowStorage
) -> tuple[CacheField, ...]:
    """Entries and their raw inputs, and the same of the indexer, for all layers of `kind`.

    A raw row is a value and a gate for every channel, twice over where windows overlap; in
    float32, because the softmax over a window is.
    """
    layers, dim, index = spec.layers_of(kind), spec.attention.head_dim, spec.indexer.dim
    entry = storage.keys(ENTRY, dim, spec.attention.rope_dim, layers)
    if kind is LayerKind.HEAVY:
        return entry, CacheField(RAW, 2 * dim, wide, layers)
    return (
        entry,
        CacheField(RAW, 4 * dim, wide, layers),
        storage.index_keys(INDEX_ENTRY, index, layers),
        CacheField(INDEX_RAW, 4 * index, wide, layers),
    )
