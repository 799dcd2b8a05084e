# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer over entries: which of them a query attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel.nn.indexer import pick
from freewheel.nn.rows import index_keys_of
from freewheel.nn.sight import EntrySight
from freewheel.spec.compressed import EntryIndexerSpec
from freewheel.spec.entry_groups import INDEX_ENTRY
from freewheel.spec.mesh import Share
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class EntryIndexer:
    """Has entries of its own, smaller ones, over the same windows (report, equations 13-17).

    They are projected and stored with the attention's (`StreamInputs`), as are its gates.
    """

    spec: EntryIndexerSpec
    layer: int
    scan: Share  # of the pages of entries

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads, and how wide one is."""
        return self.spec.heads, self.spec.dim

    def select(
        self, query: Tensor, gates: Tensor, view: StepView, cache: CachePool, sight: EntrySight
    ) -> Tensor:
        """int32 [B, W, topk], -1 padded, for query [B, W, Hi, Di] and gates float [B, W, Hi].

        The slots are of the attention's entries as well: both share a page table.
        """
        entries = index_keys_of(cache, INDEX_ENTRY, self.layer)
        table, topk = view.table(sight.places.entries), self.spec.topk
        slots = pick(query, gates, entries, table, view.rows, sight.lens, topk, self.scan)
        view.note(slots, sight.lens, table, entries.page_rows)
        return slots
