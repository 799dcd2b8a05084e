# SPDX-License-Identifier: Apache-2.0
"""One layer on parallel streams: attention, then experts, each behind a hyper-connection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel.nn.clamped_moe import ClampedMoe, load_clamped_moe
from freewheel.nn.compressed import CompressedAttention, load_compressed_attention
from freewheel.nn.hyper import HyperConnection, Left, load_hyper_connection
from freewheel.nn.norm_rope import Norm, load_wide_norm
from freewheel.nn.sight import Sight
from freewheel.nn.source import WeightSource
from freewheel.nn.summed import Summed
from freewheel.spec.compressed import CompressedSpec, LayerKind
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class RopeTables:
    """One for layers that see their window alone, one for all others."""

    window: Tensor  # float32 [T, rope]
    entries: Tensor  # float32 [T, rope]


@dataclass(frozen=True)
class StreamLayer:
    """Streams in, streams out, once the next layer is entered or they are asked for."""

    attention_hyper: HyperConnection
    attention_norm: Norm
    attention: CompressedAttention
    moe_hyper: HyperConnection
    moe_norm: Norm
    moe: ClampedMoe | Summed[ClampedMoe]

    def __call__(
        self, before: Tensor | Left, view: StepView, cache: CachePool, sight: Sight
    ) -> Left:
        """Of streams [B, W, N, D], or of what the layer below left."""
        attended = self.attention_hyper.through(
            before, self.attention_norm, lambda x: self.attention(x, view, cache, sight)
        )
        return self.moe_hyper.through(attended, self.moe_norm, lambda x: self.moe(x, view.tokens))


def load_stream_layer(
    source: WeightSource, spec: CompressedSpec, name: str, layer: int, tables: RopeTables
) -> StreamLayer:
    """The layer stored under `name`; `layer` is its index, behind the last for a draft layer.

    A draft layer sees its window alone and chooses experts by score, whatever the model's own
    layers do.
    """
    width, eps = spec.hidden_size, spec.norm_eps
    own = layer < spec.layers
    windowed = not own or spec.kinds[layer] is LayerKind.SLIDING
    hashed = spec.vocab_size if own and spec.moe.hashed[layer] else None
    table = tables.window if windowed else tables.entries
    return StreamLayer(
        attention_hyper=load_hyper_connection(source, spec, f"{name}.hc_attn"),
        attention_norm=load_wide_norm(source, f"{name}.attn_norm", width, eps),
        attention=load_compressed_attention(source, spec, f"{name}.attn", layer, table),
        moe_hyper=load_hyper_connection(source, spec, f"{name}.hc_ffn"),
        moe_norm=load_wide_norm(source, f"{name}.ffn_norm", width, eps),
        moe=load_clamped_moe(source, spec.moe, f"{name}.ffn", width, hashed=hashed),
    )
