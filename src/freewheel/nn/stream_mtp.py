# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction on parallel streams (DeepSeek-V4 report; its checkpoint's mtp.0)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel.nn.hyper import HyperHead, load_hyper_head
from freewheel.nn.linear import (
    Projection,
    TokenHead,
    TokenTable,
    load_embedding,
    load_head,
    load_linear,
)
from freewheel.nn.norm_rope import Norm, load_wide_norm
from freewheel.nn.sight import window_sight
from freewheel.nn.source import WeightSource
from freewheel.nn.stream_layer import RopeTables, StreamLayer, load_stream_layer
from freewheel.spec.compressed import CompressedSpec
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class StreamMtp:
    """Joins a position's streams, each alike, with the token behind it.

    It reads the target's streams before they are collapsed, and hands on its own likewise, so it
    can be applied again to its own result.
    """

    spec: CompressedSpec
    embedding: TokenTable
    token_norm: Norm
    hidden_norm: Norm
    token_join: Projection  # [D, D]
    hidden_join: Projection  # [D, D]
    layer: StreamLayer
    collapse: HyperHead
    final_norm: Norm
    head: TokenHead

    @property
    def hidden_width(self) -> int:
        return self.spec.hyper.streams * self.spec.hidden_size

    def forward(self, view: StepView, cache: CachePool, hidden: Tensor) -> Tensor:
        """Streams [B, W, N * D], from `hidden` [B, W, N * D] of the view's positions.

        `view.tokens`: of the positions after them.
        """
        streams = hidden.unflatten(-1, (self.spec.hyper.streams, -1))
        token = self.token_join(self.token_norm(self.embedding(view.tokens)))  # [B, W, D]
        joined = token[:, :, None] + self.hidden_join(self.hidden_norm(streams))
        sight = window_sight(self.spec, view, cache)
        return self.layer(joined, view, cache, sight).close().flatten(2)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float [..., V] of streams [..., N * D]."""
        return self.head(self.final_norm(self.collapse(hidden)))


def load_stream_mtp(
    source: WeightSource,
    spec: CompressedSpec,
    embedding: TokenTable,
    head: TokenHead,
    tables: RopeTables,
) -> StreamMtp:
    """mtp.0; `embedding` and `head` are the target's, to be shared."""
    assert spec.mtp is not None
    name, width, eps = spec.mtp_prefix.removesuffix("."), spec.hidden_size, spec.norm_eps
    if _has_own(source, f"{name}.emb.tok_emb.weight", "embed.weight"):
        embedding = load_embedding(source, f"{name}.emb.tok_emb", spec.vocab_size, width)
    target_head = "head.weight" if source.has("head.weight") else "embed.weight"
    if _has_own(source, f"{name}.head.weight", target_head):
        head = load_head(source, f"{name}.head", spec.vocab_size, width)
    return StreamMtp(
        spec=spec,
        embedding=embedding,
        token_norm=load_wide_norm(source, f"{name}.enorm", width, eps),
        hidden_norm=load_wide_norm(source, f"{name}.hnorm", width, eps),
        token_join=load_linear(source, f"{name}.e_proj", width, width),
        hidden_join=load_linear(source, f"{name}.h_proj", width, width),
        layer=load_stream_layer(source, spec, name, spec.mtp.layer, tables),
        collapse=load_hyper_head(source, spec, f"{name}.hc_head"),
        final_norm=load_wide_norm(source, f"{name}.norm", width, eps),
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
