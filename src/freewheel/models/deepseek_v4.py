# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: compressed attention on parallel streams (config.json: model_type deepseek_v4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel.models.deepseek_v4_names import PublishedNames
from freewheel.nn import (
    HyperHead,
    Norm,
    RopeTables,
    StreamLayer,
    StreamMtp,
    TokenHead,
    TokenTable,
    WeightSource,
    entry_groups,
    load_embedding,
    load_head,
    load_hyper_head,
    load_stream_layer,
    load_stream_mtp,
    load_wide_norm,
    rope_table,
    spread,
    whole_sight,
)
from freewheel.spec.cache import CacheGroup
from freewheel.spec.compressed import CompressedSpec
from freewheel.spec.storage import PlainStorage, RowStorage
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class DeepseekV4:
    """The target model. Its hidden states are all N streams, N * D wide: `logits` collapses them,
    and the draft layer reads them as they are."""

    spec: CompressedSpec
    embedding: TokenTable
    layers: tuple[StreamLayer, ...]
    collapse: HyperHead
    final_norm: Norm
    head: TokenHead
    has_mtp: bool

    def cache_groups(
        self, page_size: int, dtype: str, storage: RowStorage | None = None
    ) -> tuple[CacheGroup, ...]:
        """The window of every layer; entries, and what they are mixed from, of each kind."""
        wide, own = "float64" if dtype == "float64" else "float32", storage or PlainStorage(dtype)
        return entry_groups(self.spec, page_size, wide, own, self.has_mtp)

    def forward(self, view: StepView, cache: CachePool) -> Tensor:
        """Streams [B, W, N * D] behind the last layer."""
        streams = spread(self.embedding(view.tokens), self.spec.hyper.streams)  # [B, W, N, D]
        sight = whole_sight(self.spec, view, cache)
        first, *others = self.layers
        left = first(streams, view, cache, sight)
        for layer in others:
            left = layer(left, view, cache, sight)
        return left.close().flatten(2)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float [..., V] of streams [..., N * D]."""
        return self.head(self.final_norm(self.collapse(hidden)))


def load_deepseek_v4(
    spec: CompressedSpec, stored: WeightSource, positions: int, mtp: bool
) -> tuple[DeepseekV4, StreamMtp | None]:
    """Ask `stored` for every tensor of the model and, with `mtp`, of its draft layer.

    `positions`: how many positions a row may have.
    """
    source = PublishedNames(stored, spec.layers)
    tables = RopeTables(
        window=rope_table(spec.rope, positions, source.device),
        entries=rope_table(spec.entry_rope, positions, source.device),
    )
    embedding = load_embedding(source, "embed", spec.vocab_size, spec.hidden_size)
    layers = tuple(
        load_stream_layer(source, spec, f"layers.{i}", i, tables) for i in range(spec.layers)
    )
    collapse = load_hyper_head(source, spec, "hc_head")
    final_norm = load_wide_norm(source, "norm", spec.hidden_size, spec.norm_eps)
    tied = embedding if spec.tied_head else None
    head = load_head(source, "head", spec.vocab_size, spec.hidden_size, tied)
    draft = load_stream_mtp(source, spec, embedding, head, tables) if mtp else None
    return DeepseekV4(spec, embedding, layers, collapse, final_norm, head, mtp), draft
