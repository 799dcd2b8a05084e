# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: one more layer that reads the next token (DeepSeek-V3, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel.nn.decoder import DecoderLayer, load_decoder_layer
from freewheel.nn.linear import Embedding, Head, Projection, load_linear
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

    embedding: Embedding
    token_norm: Norm
    hidden_norm: Norm
    join: Projection  # [H, 2 * H]
    layer: DecoderLayer
    final_norm: Norm
    head: Head

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
    source: WeightSource, spec: DsaSpec, embedding: Embedding, head: Head, table: Tensor
) -> MtpLayer:
    """model.layers.{num_hidden_layers}; `embedding` and `head` are the target's, to be shared."""
    assert spec.mtp is not None
    name, width, eps = f"model.layers.{spec.mtp.layer}", spec.hidden_size, spec.norm_eps
    own_embedding = _own(source, f"{name}.embed_tokens.weight", EMBEDDING, spec)
    target_head = "lm_head.weight" if source.has("lm_head.weight") else EMBEDDING
    own_head = _own(source, f"{name}.shared_head.head.weight", target_head, spec)
    return MtpLayer(
        embedding=embedding if own_embedding is None else Embedding(own_embedding),
        token_norm=load_norm(source, f"{name}.enorm", width, eps),
        hidden_norm=load_norm(source, f"{name}.hnorm", width, eps),
        join=load_linear(source, f"{name}.eh_proj", width, 2 * width),
        layer=load_decoder_layer(
            source, spec, spec.mtp.layer, table, sparse=spec.mtp.sparse, full=True
        ),
        final_norm=load_norm(source, f"{name}.shared_head.norm", width, eps),
        head=head if own_head is None else Head(own_head),
    )


def _own(source: WeightSource, name: str, shared: str, spec: DsaSpec) -> Tensor | None:
    """The layer's own table [V, H], or None where it stores none or a copy of the target's."""
    if not source.has(name):
        return None
    if source.same(name, shared):
        source.skip(name, f"holds the same values as {shared}, which serves for both")
        return None
    return source.tensor(name, (spec.vocab_size, spec.hidden_size))
