# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention in its absorbed form, over picked keys (DeepSeek-V2, section 2.1).

A token stores one latent and one rotated key, shared by all heads. The up-projection of keys is
moved to the query's side and that of values behind the attention, so keys are never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel import ops
from freewheel.nn.history import HISTORY, LATENT
from freewheel.nn.indexer import Indexer, load_indexer
from freewheel.nn.linear import Linear, load_linear
from freewheel.nn.norm_rope import Norm, load_norm
from freewheel.nn.source import WeightSource
from freewheel.spec.model import AttentionSpec, DsaSpec
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class SparseMla:
    """One layer's attention. `indexer` None: it attends to the keys that a layer below picked."""

    spec: AttentionSpec
    layer: int
    q_a: Linear  # [q_lora, H]
    q_a_norm: Norm
    q_b: Linear  # [heads * (nope + rope), q_lora]
    kv_a: Linear  # [kv_lora + rope, H]
    kv_a_norm: Norm
    key_up: Tensor  # float [heads, nope, kv_lora]
    value_up: Tensor  # float [heads, kv_lora, value]
    output: Linear  # [H, heads * value]
    indexer: Indexer | None
    rope_table: Tensor  # float32 [T, rope]

    def __call__(
        self, x: Tensor, view: StepView, cache: CachePool, slots: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention output [B, W, H] of x [B, W, H], and the slots attended to, int32 [B, W, topk].

        `slots`: the picks of the nearest full layer below; used if this layer has no indexer.
        """
        q_latent = self.q_a_norm(self.q_a(x))  # [B, W, q_lora]
        latent = self._store(x, view, cache)
        if self.indexer is not None:
            slots = self.indexer.select(x, q_latent, view, cache)
        assert slots is not None, "a layer without an indexer stands above one that has"
        query = self._absorbed_query(q_latent, view)  # [B, W, heads, kv_lora + rope]
        mixed = ops.sparse_mla(query, latent, slots, self.spec.scale, self.spec.kv_lora_rank)
        values = torch.einsum("bwhc,hcv->bwhv", mixed, self.value_up)
        return self.output(values.flatten(2)), slots

    def _store(self, x: Tensor, view: StepView, cache: CachePool) -> Tensor:
        """Write the latents of x [B, W, H]; returns the layer's cache [n_pages, page_size, D]."""
        latent = cache.layer(LATENT, self.layer)
        ops.store_latent(
            latent,
            self.kv_a(x),
            self.kv_a_norm.weight,
            self.kv_a_norm.eps,
            view.positions,
            self.rope_table,
            self.spec.interleaved,
            view.write_slots[HISTORY],
        )
        return latent

    def _absorbed_query(self, q_latent: Tensor, view: StepView) -> Tensor:
        """[B, W, heads, kv_lora + rope] of q_latent [B, W, q_lora]."""
        spec = self.spec
        query = self.q_b(q_latent).unflatten(-1, (spec.heads, spec.query_dim))
        nope, rope = query.split((spec.nope_dim, spec.rope_dim), dim=-1)
        rotated = ops.rope(rope, view.positions, self.rope_table, 0, spec.interleaved)
        absorbed = torch.einsum("bwhn,hnc->bwhc", nope, self.key_up)
        return torch.cat((absorbed, rotated), dim=-1)


def load_mla(
    source: WeightSource, spec: DsaSpec, name: str, layer: int, full: bool, table: Tensor
) -> SparseMla:
    """The attention stored under `name`, of model layer `layer`; `full`: with its own indexer."""
    own = spec.attention
    width, eps = spec.hidden_size, own.latent_norm_eps
    key_up, value_up = _split_kv_b(source, own, name)
    if full:
        indexer = load_indexer(source, spec, f"{name}.indexer", layer, table)
    else:
        indexer = None
        source.skip(f"{name}.indexer.*", "this layer attends to the picks of a layer below")
    return SparseMla(
        spec=own,
        layer=layer,
        q_a=load_linear(source, f"{name}.q_a_proj", own.q_lora_rank, width),
        q_a_norm=load_norm(source, f"{name}.q_a_layernorm", own.q_lora_rank, eps),
        q_b=load_linear(source, f"{name}.q_b_proj", own.heads * own.query_dim, own.q_lora_rank),
        kv_a=load_linear(source, f"{name}.kv_a_proj_with_mqa", own.latent_width, width),
        kv_a_norm=load_norm(source, f"{name}.kv_a_layernorm", own.kv_lora_rank, eps),
        key_up=key_up,
        value_up=value_up,
        output=load_linear(source, f"{name}.o_proj", width, own.heads * own.value_dim),
        indexer=indexer,
        rope_table=table,
    )


def _split_kv_b(source: WeightSource, own: AttentionSpec, name: str) -> tuple[Tensor, Tensor]:
    """kv_b_proj apart: keys' [heads, nope, kv_lora], and values' [heads, kv_lora, value]."""
    rows = own.heads * (own.nope_dim + own.value_dim)
    weight = source.tensor(f"{name}.kv_b_proj.weight", (rows, own.kv_lora_rank))
    by_head = weight.view(own.heads, own.nope_dim + own.value_dim, own.kv_lora_rank)
    key_up, value_up = by_head.split((own.nope_dim, own.value_dim), dim=1)
    return key_up.contiguous(), value_up.transpose(1, 2).contiguous()
