# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: one more layer that reads the next token (DeepSeek-V3, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel.nn.decoder import DecoderLayer, load_decoder_layer
from freewheel.nn.linear import (
    Projection,
    TokenHead,
    TokenTable,
    load_embedding,
    load_head,
    load_linear,
)
from freewheel.nn.norm_rope import Norm, load_norm
from freewheel.nn.source import WeightSource
from freewheel.spec.model import DsaSpec
from freewheel.state import CachePool, StepView

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class MtpLayer:
    """Joins a position's hidden state with the token behind it, and predicts the one after that.

    It shares the target's embedding and head unless the checkpoint stores others for it. Its
    output is an input of the same kind, so it can be applied again to its own result.
    """

    embedding: TokenTable
    token_norm: Norm
    hidden_norm: Norm
    join: Projection  # [H, 2 * H]
    layer: DecoderLayer
    final_norm: Norm
    head: TokenHead

    @property
    def hidden_width(self) -> int:
        return self.hidden_norm.weight.shape[0]

    def forward(self, view: StepView, cache: CachePool, hidden: Tensor) -> Tensor:
        """Hidden states [B, W, H] behind the layer's own final norm.

        `hidden` [B, W, H]: of the view's positions, behind a final norm. `view.tokens`: of the
        positions after them. The token's half comes first in the joined vector.
        """
        token = self.token_norm(self.embedding(view.tokens))
        x = self.join(torch.cat((token, self.hidden_norm(hidden)), dim=-1))
        x, residual, _ = self.layer(x, None, view, cache, None)
        return self.final_norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float [..., V] of hidden [..., H]."""
        return self.head(hidden)


def load_mtp_layer(
    source: WeightSource, spec: DsaSpec, embedding: TokenTable, head: TokenHead, table: Tensor
) -> MtpLayer:
    """model.layers.{num_hidden_layers}; `embedding` and `head` are the target's, to be shared."""
    assert spec.mtp is not None
    name, width, eps = f"model.layers.{spec.mtp.layer}", spec.hidden_size, spec.norm_eps
    if _has_own(source, f"{name}.embed_tokens.weight", EMBEDDING):
        embedding = load_embedding(source, f"{name}.embed_tokens", spec.vocab_size, width)
    target_head = "lm_head.weight" if source.has("lm_head.weight") else EMBEDDING
    if _has_own(source, f"{name}.shared_head.head.weight", target_head):
        head = load_head(source, f"{name}.shared_head.head", spec.vocab_size, width)
    return MtpLayer(
        embedding=embedding,
        token_norm=load_norm(source, f"{name}.enorm", width, eps),
        hidden_norm=load_norm(source, f"{name}.hnorm", width, eps),
        join=load_linear(source, f"{name}.eh_proj", width, 2 * width),
        layer=load_decoder_layer(
            source, spec, spec.mtp.layer, table, sparse=spec.mtp.sparse, full=True
        ),
        final_norm=load_norm(source, f"{name}.shared_head.norm", width, eps),
        head=head,
    )


def _has_own(source: WeightSource, name: str, shared: str) -> bool:
    """Whether the layer stores a table of its own, other than a copy of the target's."""
    if not source.has(name):
        return False
    if source.same(name, shared):
        source.skip(name, f"holds the same values as {shared}, which serves for both")
        return False
    return True
