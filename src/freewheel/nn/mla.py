# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention in its absorbed form, over picked keys (DeepSeek-V2, section 2.1).

A token stores one latent and one rotated key, shared by all heads. The up-projection of keys is
moved to the query's side and that of values behind the attention, so keys are never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from freewheel import ops
from freewheel.nn.cut import check_even, outputs_of
from freewheel.nn.indexer import Indexer, load_indexer
from freewheel.nn.linear import (
    BlockLinear,
    Projection,
    StackedLinear,
    load_closing_linear,
    load_stacked_linear,
)
from freewheel.nn.norm_rope import Norm, load_norm
from freewheel.nn.rows import Latents, PlainLatents, latents_of
from freewheel.nn.source import WeightSource
from freewheel.spec.history import HISTORY, LATENT
from freewheel.spec.model import AttentionSpec, DsaSpec
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class SparseMla:
    """One layer's attention. `indexer` None: it attends to the keys that a layer below picked."""

    spec: AttentionSpec
    layer: int
    down: StackedLinear  # [q_lora + Di + kv_lora + rope, H], Di of the index keys or 0
    query_norm: Norm
    latent_norm: Norm
    up: StackedLinear  # [Hi * Di + heads * (nope + rope), q_lora], Hi * Di of the indexer or 0
    key_up: Tensor  # float [heads, nope, kv_lora]
    value_up: Tensor  # float [heads, kv_lora, value]
    output: Projection  # [H, heads * value]
    indexer: Indexer | None
    rope_table: Tensor  # float32 [T, rope]

    def __call__(
        self, x: Tensor, view: StepView, cache: CachePool, slots: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What `output` projects [B, W, heads * value] of x [B, W, H], and the slots attended to.

        Those are int32 [B, W, topk].
        `slots`: the picks of the nearest full layer below; used if this layer has no indexer.
        """
        spec, latent = self.spec, latents_of(cache, LATENT, self.layer)
        index_key, gates, index_query, query = self.project(x, latent, view)
        query = query.unflatten(-1, (spec.heads, spec.query_dim))
        if self.indexer is not None:
            own = (query, self.key_up, spec.interleaved)
            slots, query = self.indexer.select(gates, index_key, index_query, view, cache, own)
        else:
            query = ops.absorb_query(
                query, self.key_up, view.positions, self.rope_table, spec.interleaved
            )  # [B, W, heads, kv_lora + rope]
        assert slots is not None, "a layer without an indexer stands above one that has"
        place = (view.page_tables[HISTORY], view.rows)
        return latent.attend(query, slots, spec.scale, self.value_up, *place), slots

    def project(
        self, x: Tensor, latent: Latents, view: StepView
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Store the latents of x [B, W, H] in `latent`; returns what else is made of x.

        Index keys [B, W, Di], their gates float [B, W, Hi] and queries [B, W, Hi * Di], of no
        columns without an indexer, and queries [B, W, heads * (nope + rope)], as projected.
        """
        norms = (self.query_norm.weight, self.latent_norm.weight, self.spec.latent_norm_eps)
        place = (self.rope_table, self.spec.interleaved, view.write_slots[HISTORY])
        own = (view.positions, *place)
        match latent, self.down.joined:
            case PlainLatents(cache), BlockLinear(weight, scale) if self.indexer is not None:
                gate_weight = self.indexer.weights.weight
                query, index_key, gates = ops.block_open_latents(
                    cache, x, weight, scale, gate_weight, *norms, *own
                )
            case _:
                query, index_key, compressed = self.down(x)
                query = latent.norm(query, norms[0], compressed, *norms[1:], *own)
                gates = index_key if self.indexer is None else self.indexer.weights(x)
        index_query, query = self.up(query)
        return index_key, gates, index_query, query


def load_mla(
    source: WeightSource, spec: DsaSpec, name: str, layer: int, full: bool, table: Tensor
) -> SparseMla:
    """The attention stored under `name`, of model layer `layer`; `full`: with its own indexer.

    Ranks share the heads. Latents and the indexer are the same on all of them, so that each stores
    the whole cache and picks the same keys.
    """
    own, index, eps = spec.attention, spec.indexer, spec.attention.latent_norm_eps
    indexer, key, query = None, 0, 0
    check_even(source.mesh.layer, own.heads, f"heads of {name}")
    if full:
        indexer = load_indexer(source, spec, f"{name}.indexer", layer, table)
        key, query = index.dim, index.heads * index.dim
    else:
        source.skip(f"{name}.indexer.*", "this layer attends to the picks of a layer below")
    key_up, value_up = _split_kv_b(source, own, name)
    # Rows of 128 begin at every part but behind the last, for weights scaled in blocks of 128.
    down = (
        (f"{name}.q_a_proj", own.q_lora_rank),
        (f"{name}.indexer.wk", key),
        (f"{name}.kv_a_proj_with_mqa", own.latent_width),
    )
    up = ((f"{name}.indexer.wq_b", query), (f"{name}.q_b_proj", own.heads * own.query_dim))
    return SparseMla(
        spec=replace(own, heads=len(source.mesh.layer.of(own.heads))),
        layer=layer,
        down=load_stacked_linear(source, down, spec.hidden_size),
        query_norm=load_norm(source, f"{name}.q_a_layernorm", own.q_lora_rank, eps),
        latent_norm=load_norm(source, f"{name}.kv_a_layernorm", own.kv_lora_rank, eps),
        up=load_stacked_linear(source, up, own.q_lora_rank, (f"{name}.q_b_proj",)),
        key_up=key_up,
        value_up=value_up,
        output=load_closing_linear(
            source, f"{name}.o_proj", spec.hidden_size, own.heads * own.value_dim
        ),
        indexer=indexer,
        rope_table=table,
    )


def _split_kv_b(source: WeightSource, own: AttentionSpec, name: str) -> tuple[Tensor, Tensor]:
    """kv_b_proj apart: keys' [heads, nope, kv_lora], and values' [heads, kv_lora, value].

    Of this rank's heads.
    """
    rows, share = own.heads * (own.nope_dim + own.value_dim), source.mesh.layer
    weight = source.dense(
        f"{name}.kv_b_proj.weight", (rows, own.kv_lora_rank), cut=outputs_of(share)
    )
    by_head = weight.view(-1, own.nope_dim + own.value_dim, own.kv_lora_rank)
    key_up, value_up = by_head.split((own.nope_dim, own.value_dim), dim=1)
    return key_up.contiguous(), value_up.transpose(1, 2).contiguous()
