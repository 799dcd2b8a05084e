# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2: every layer runs an indexer of its own (config.json: model_type deepseek_v32)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel.nn import (
    DecoderLayer,
    MtpLayer,
    Norm,
    TokenHead,
    TokenTable,
    WeightSource,
    history_group,
    load_decoder_layer,
    load_embedding,
    load_head,
    load_mtp_layer,
    load_norm,
    rope_table,
)
from freewheel.spec.cache import CacheGroup
from freewheel.spec.model import DsaSpec
from freewheel.spec.storage import PlainStorage, RowStorage
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class DeepseekV32:
    """The target model."""

    spec: DsaSpec
    embedding: TokenTable
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    head: TokenHead
    has_mtp: bool

    def cache_groups(
        self, page_size: int, dtype: str, storage: RowStorage | None = None
    ) -> tuple[CacheGroup, ...]:
        """One group: latents and index keys of every layer."""
        return (history_group(self.spec, page_size, storage or PlainStorage(dtype), self.has_mtp),)

    def forward(self, view: StepView, cache: CachePool) -> Tensor:
        """Hidden states [B, W, H] behind the final norm."""
        x, residual = self.embedding(view.tokens), None  # [B, W, H]
        for layer in self.layers:
            x, residual, _ = layer(x, residual, view, cache, None)
        return self.final_norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float [..., V] of hidden [..., H]."""
        return self.head(hidden)


def load_deepseek_v32(
    spec: DsaSpec, source: WeightSource, positions: int, mtp: bool
) -> tuple[DeepseekV32, MtpLayer | None]:
    """Ask `source` for every tensor of the model and, with `mtp`, of its draft layer.

    `positions`: how many positions a row may have.
    """
    table = rope_table(spec.rope, positions, source.device)
    embedding = load_embedding(source, "model.embed_tokens", spec.vocab_size, spec.hidden_size)
    layers = tuple(
        load_decoder_layer(source, spec, i, table, sparse=sparse, full=True)
        for i, sparse in enumerate(spec.sparse_layers)
    )
    final_norm = load_norm(source, "model.norm", spec.hidden_size, spec.norm_eps)
    tied = embedding if spec.tied_head else None
    head = load_head(source, "lm_head", spec.vocab_size, spec.hidden_size, tied)
    draft = load_mtp_layer(source, spec, embedding, head, table) if mtp else None
    return DeepseekV32(spec, embedding, layers, final_norm, head, mtp), draft
