# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model pick keys, and what a pick stands for."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.spec.compressed import CompressedSpec, LayerKind
from freewheel.spec.entry_groups import entry_places
from freewheel.spec.model import DsaSpec, ModelSpec


@dataclass(frozen=True)
class PickedLayers:
    """`layers`: those with an indexer, ascending; each picks at most `topk` keys for a query.

    Key k is mixed from the `span` tokens before position `(k + 1) * ratio`, as far as there are so
    many: of token k itself where both are 1. `window`: latest tokens that a query sees besides.
    """

    layers: tuple[int, ...] = ()
    topk: int = 0
    ratio: int = 1
    span: int = 1
    window: int = 0

    def tokens(self, key: int) -> range:
        """Positions of the tokens that a key stands for."""
        stop = (key + 1) * self.ratio
        return range(max(0, stop - self.span), stop)

    @property
    def words(self) -> int:
        """Ints that hold the picks of one query."""
        return len(self.layers) * self.topk


def picked_layers(spec: ModelSpec) -> PickedLayers:
    """Of a model. Draft layers do not count."""
    if isinstance(spec, DsaSpec):
        full = spec.indexer.full_layers
        return PickedLayers(tuple(i for i, own in enumerate(full) if own), spec.indexer.topk)
    if not isinstance(spec, CompressedSpec):
        return PickedLayers()
    layers, window = spec.layers_of(LayerKind.SPARSE), spec.attention.window
    if not layers:
        return PickedLayers(window=window)
    places = entry_places(spec)[LayerKind.SPARSE]
    return PickedLayers(layers, spec.indexer.topk, places.ratio, places.span, window)
