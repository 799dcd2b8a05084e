# SPDX-License-Identifier: Apache-2.0
"""One layer of the stack: sparse attention, then a feed-forward layer, each behind a norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel import ops
from freewheel.nn.linear import BlockLinear, Projection
from freewheel.nn.mla import SparseMla, load_mla
from freewheel.nn.moe import Mlp, load_mlp
from freewheel.nn.norm_rope import Norm, load_norm
from freewheel.nn.source import WeightSource
from freewheel.spec.model import DsaSpec
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class DecoderLayer:
    """Norms before, sums after: the sum of a layer is left to the norm above it."""

    attention_norm: Norm
    attention: SparseMla
    mlp_norm: Norm
    mlp: Mlp

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        view: StepView,
        cache: CachePool,
        slots: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(x, residual: [B, W, H], slots: int32 [B, W, topk]); the stream is x + residual.

        `residual` None: x is the whole stream. `slots`: the picks of the nearest full layer below.
        """
        normed, residual = self.attention_norm.add(x, residual)
        mixed, slots = self.attention(normed, view, cache, slots)
        normed, residual = _project_and_norm(self.attention.output, mixed, residual, self.mlp_norm)
        return self.mlp(normed), residual, slots


def _project_and_norm(
    output: Projection, x: Tensor, residual: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """(norm(sum), sum) of `output` of x and residual [B, W, H]."""
    match output:
        case BlockLinear(weight, scale):
            normed, total = ops.block_add_rms_norm(
                x, weight, scale, residual, norm.weight, norm.eps
            )
            return normed, total
        case _:
            return norm.add(output(x), residual)


def load_decoder_layer(
    source: WeightSource,
    spec: DsaSpec,
    layer: int,
    table: Tensor,
    *,
    sparse: bool,
    full: bool,
) -> DecoderLayer:
    """model.layers.`layer`. `sparse`: a mixture of experts; `full`: an indexer of its own."""
    name = f"model.layers.{layer}"
    source.skip(f"{name}.self_attn.rotary_emb.inv_freq", "recomputed from config.json")
    return DecoderLayer(
        load_norm(source, f"{name}.input_layernorm", spec.hidden_size, spec.norm_eps),
        load_mla(source, spec, f"{name}.self_attn", layer, full, table),
        load_norm(source, f"{name}.post_attention_layernorm", spec.hidden_size, spec.norm_eps),
        load_mlp(source, spec, f"{name}.mlp", sparse),
    )
