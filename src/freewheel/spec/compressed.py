# SPDX-License-Identifier: Apache-2.0
"""What a DeepSeek-V4 checkpoint's config says of its model, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from freewheel.spec.model import ModelSpec, RopeSpec

V4 = "deepseek_v4"
"""The `model_type` of this family."""


class LayerKind(StrEnum):
    """What a layer reads besides its window of tokens.

    SLIDING: nothing. SPARSE: the best of the overlapping entries of a few tokens each, as an
    indexer picks them. HEAVY: all of the entries of many tokens each.
    """

    SLIDING = "sliding_attention"
    SPARSE = "compressed_sparse_attention"
    HEAVY = "heavily_compressed_attention"


@dataclass(frozen=True)
class SharedKvSpec:
    """Attention with one head of keys that are also the values (DeepSeek-V4 report, section 2.3).

    The last `rope_dim` of `head_dim` dimensions are rotated, in neighbouring pairs. A query sees
    `window` tokens, itself included. The output goes through `groups` low-rank projections.
    """

    heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    groups: int
    group_rank: int
    window: int

    @property
    def scale(self) -> float:
        """What multiplies q.k."""
        return self.head_dim**-0.5

    @property
    def group_width(self) -> int:
        """Elements of the attention's output that one group projects."""
        return self.heads * self.head_dim // self.groups


@dataclass(frozen=True)
class CompressionSpec:
    """Tokens an entry stands for, in each kind of layer that has entries.

    An entry of a SPARSE layer mixes its own `sparse_ratio` tokens and those before them.
    """

    sparse_ratio: int
    heavy_ratio: int


@dataclass(frozen=True)
class EntryIndexerSpec:
    """The lightning indexer over entries: `topk` of them for each query."""

    heads: int
    dim: int
    topk: int


@dataclass(frozen=True)
class HyperSpec:
    """Manifold-constrained hyper-connections (arXiv:2512.24880): parallel residual streams.

    `iterations` of Sinkhorn's normalisation; `eps` is added to what it divides by.
    """

    streams: int
    iterations: int
    eps: float


@dataclass(frozen=True)
class ClampedMoeSpec:
    """Experts with sqrt(softplus) scores and clamped activations.

    `hashed[i]`: layer i's experts follow from the token's id by a table. `limit` bounds the gate
    from above and the other half on both sides, in routed and in shared experts.
    """

    experts: int
    top_k: int
    width: int
    shared: int
    scale: float
    limit: float
    hashed: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(ModelSpec):
    """A DeepSeek-V4 model. `kinds[i]`: what layer i reads.

    `rope` turns layers of kind SLIDING, `entry_rope` all others: their queries, keys and entries.
    """

    attention: SharedKvSpec
    kinds: tuple[LayerKind, ...]
    compression: CompressionSpec
    indexer: EntryIndexerSpec
    rope: RopeSpec
    entry_rope: RopeSpec
    hyper: HyperSpec
    moe: ClampedMoeSpec

    @property
    def ratios(self) -> tuple[int, ...]:
        """Tokens an entry stands for, of the kinds of entries that some layer has."""
        present = {self.ratio(kind) for kind in self.kinds if kind is not LayerKind.SLIDING}
        return tuple(sorted(present))

    def ratio(self, kind: LayerKind) -> int:
        """Tokens that an entry of this kind of layer stands for."""
        sparse = kind is LayerKind.SPARSE
        return self.compression.sparse_ratio if sparse else self.compression.heavy_ratio

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Which layers are of this kind."""
        return tuple(i for i, own in enumerate(self.kinds) if own is kind)

    @property
    def page_multiple(self) -> int:
        return math.lcm(*self.ratios) if self.ratios else 1

    @property
    def mtp_prefix(self) -> str:
        return "mtp.0."

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        return self.mtp_prefix, f"model.layers.{self.layers}."

    @property
    def reading(self) -> str:
        own, index = self.compression, self.indexer
        parts = [f"a window of {self.attention.window} tokens"]
        if LayerKind.SPARSE in self.kinds:
            parts.append(f"the best {index.topk} entries of {own.sparse_ratio}")
        if LayerKind.HEAVY in self.kinds:
            parts.append(f"all entries of {own.heavy_ratio}")
        return ", ".join(parts)
