# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer over entries: which of them a query attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel import ops
from freewheel.nn.compressor import Compressor, load_index_compressor
from freewheel.nn.indexer import pick
from freewheel.nn.linear import Linear, Projection, load_linear, load_wide_linear
from freewheel.nn.rows import index_keys_of
from freewheel.nn.sight import EntrySight
from freewheel.nn.source import WeightSource
from freewheel.spec.compressed import CompressedSpec, EntryIndexerSpec
from freewheel.spec.entry_groups import INDEX_ENTRY
from freewheel.spec.mesh import Share
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class EntryIndexer:
    """Has entries of its own, smaller ones, over the same windows (report, equations 13-17).

    `weights` (one gate a head) stays in float32: rounding it changes which entries are kept.
    """

    spec: EntryIndexerSpec
    compressor: Compressor
    query: Projection  # [Hi * Di, q_lora]
    weights: Linear  # float32 [Hi, H]
    rope_table: Tensor  # float32 [T, rope]
    scan: Share  # of the pages of entries

    def select(
        self, x: Tensor, q_latent: Tensor, view: StepView, cache: CachePool, sight: EntrySight
    ) -> Tensor:
        """Store the indexer's entries of x [B, W, H], then pick: int32 [B, W, topk], -1 padded.

        q_latent [B, W, q_lora] is the attention's normed query latent. The slots are of the
        attention's entries as well: both share a page table.
        """
        spec = self.spec
        entries = index_keys_of(cache, INDEX_ENTRY, self.compressor.layer)
        self.compressor.store(x, entries, view, cache, sight)
        query = self.query(q_latent).unflatten(-1, (spec.heads, spec.dim))  # [B, W, Hi, Di]
        query = ops.rope_tail(query, view.positions, self.rope_table, False)
        gates = self.weights(x) * (spec.heads * spec.dim) ** -0.5  # float [B, W, Hi]
        table = view.table(sight.places.entries)
        return pick(query, gates, entries, table, view.rows, sight.lens, spec.topk, self.scan)


def load_entry_indexer(
    source: WeightSource, spec: CompressedSpec, name: str, layer: int, table: Tensor
) -> EntryIndexer:
    """The indexer stored under `name`, of model layer `layer`."""
    own, rank = spec.indexer, spec.attention.q_lora_rank
    return EntryIndexer(
        spec=own,
        compressor=load_index_compressor(source, spec, f"{name}.compressor", layer, table),
        query=load_linear(source, f"{name}.wq_b", own.heads * own.dim, rank),
        weights=load_wide_linear(source, f"{name}.weights_proj", own.heads, spec.hidden_size),
        rope_table=table,
        scan=source.mesh.scan,
    )
