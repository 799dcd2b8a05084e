# SPDX-License-Identifier: Apache-2.0
"""What a rectangle's queries see, and which entries it completes: found once, for all layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel import ops
from freewheel.spec.compressed import CompressedSpec, LayerKind
from freewheel.spec.entry_groups import WINDOW, EntryPlaces, entry_places
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class EntrySight:
    """One kind of entries. `slots` is None where an indexer picks them."""

    places: EntryPlaces
    lens: Tensor  # int32 [B, W]  entries that each query sees
    slots: Tensor | None  # int32 [B, W, S]  of all of them, -1 padded
    windows: Tensor  # int32 [B, K]  that close in the rectangle, -1 padded
    write_slots: Tensor  # int64 [B, K]  of their entries
    raw_slots: Tensor  # int32 [B, K, span]  of what their entries are mixed from


@dataclass(frozen=True)
class Sight:
    """Derived from a StepView in the graph: no length comes from the host."""

    window: Tensor  # int32 [B, W, window]  slots of the latest tokens, -1 before the first
    nothing: Tensor  # int32 [B, W, 0]
    entries: dict[LayerKind, EntrySight]


def window_sight(spec: CompressedSpec, view: StepView, cache: CachePool) -> Sight:
    """Of a rectangle through layers that see their window alone."""
    table, page_size = view.table(WINDOW), cache.groups[WINDOW].page_size
    width = spec.attention.window
    slots = ops.window_slots(table, view.rows, view.kv_lens, page_size, width)
    return Sight(slots, slots[:, :, :0], {})


def whole_sight(spec: CompressedSpec, view: StepView, cache: CachePool) -> Sight:
    """Of a rectangle through all layers."""
    seen = window_sight(spec, view, cache)
    kinds = entry_places(spec).items()
    entries = {kind: _entry_sight(kind, places, view, cache) for kind, places in kinds}
    return Sight(seen.window, seen.nothing, entries)


def _entry_sight(
    kind: LayerKind, places: EntryPlaces, view: StepView, cache: CachePool
) -> EntrySight:
    table, group = view.table(places.entries), cache.groups[places.entries]
    lens = view.kv_lens // places.ratio
    slots = None
    if kind is LayerKind.HEAVY:
        slots = ops.entry_slots(table, view.rows, lens, group.page_rows)
    planned = ops.plan_closings(
        view.positions,
        view.kv_lens,
        view.rows,
        view.table(places.tail),
        table,
        cache.groups[places.tail].page_size,
        group.page_rows,
        places.ratio,
        places.span,
    )
    return EntrySight(places, lens, slots, *planned)
