# SPDX-License-Identifier: Apache-2.0
"""Attention whose one head of keys is also its values, over a window and over entries.

DeepSeek-V4 report, section 2.3. Keys are rotated, so the values are: what the attention returns is
turned back by the query's own angle, and each value counts by its distance alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freewheel.nn.compressor import Compressor, load_compressor
from freewheel.nn.cut import check_even, inputs_of, outputs_of
from freewheel.nn.entry_indexer import EntryIndexer, load_entry_indexer
from freewheel.nn.linear import Projection, load_closing_linear, load_linear
from freewheel.nn.norm_rope import Norm, load_wide_norm
from freewheel.nn.rows import keys_of
from freewheel.nn.sight import Sight
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.spec.compressed import CompressedSpec, LayerKind, SharedKvSpec
from freewheel.spec.entry_groups import ENTRY, KEY, WINDOW
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class CompressedAttention:
    """One layer's. Without a compressor it sees its window alone; with an indexer, picked entries;
    with a compressor alone, all of them."""

    spec: SharedKvSpec
    kind: LayerKind
    layer: int
    query_norm_eps: float
    q_a: Projection  # [q_lora, H]
    q_a_norm: Norm
    q_b: Projection  # [heads * head_dim, q_lora]
    kv: Projection  # [head_dim, H]
    kv_norm: Norm
    sinks: Tensor  # float32 [heads]
    group_down: Tensor  # float [groups, group_rank, group_width]
    output: Projection  # [H, groups * group_rank]
    compressor: Compressor | None
    indexer: EntryIndexer | None
    rope_table: Tensor  # float32 [T, rope]

    def __call__(self, x: Tensor, view: StepView, cache: CachePool, sight: Sight) -> Tensor:
        """Attention output [B, W, H] of x [B, W, H]."""
        spec, table = self.spec, self.rope_table
        q_latent = self.q_a_norm(self.q_a(x))  # [B, W, q_lora]
        query = self.q_b(q_latent).unflatten(-1, (spec.heads, spec.head_dim))
        keys = keys_of(cache, KEY, self.layer)
        query = keys.place(
            query,
            self.query_norm_eps,
            self.kv(x),
            self.kv_norm.weight,
            self.kv_norm.eps,
            view.positions,
            table,
            view.write_slots[WINDOW],
        )
        entries, picks = self._entries(x, q_latent, view, cache, sight)
        mixed = keys.attend(
            query,
            sight.window,
            keys.tensor if entries is None else entries,
            picks,
            self.sinks,
            spec.scale,
            view.positions,
            table,
        )  # [B, W, heads, head_dim]
        grouped = mixed.flatten(2).unflatten(-1, (spec.groups, spec.group_width))
        low = torch.einsum("bwgi,gri->bwgr", grouped, self.group_down)
        return self.output(low.flatten(2))

    def _entries(
        self, x: Tensor, q_latent: Tensor, view: StepView, cache: CachePool, sight: Sight
    ) -> tuple[Tensor | None, Tensor]:
        """The entries' cache [n_pages, page_rows, D or bytes], and the picks: int32 [B, W, E]."""
        if self.compressor is None:
            return None, sight.nothing
        own = sight.entries[self.kind]
        entries = keys_of(cache, ENTRY, self.layer)
        self.compressor.store(x, entries, view, cache, own)
        if self.indexer is not None:
            return entries.tensor, self.indexer.select(x, q_latent, view, cache, own)
        assert own.slots is not None, "layers without an indexer see all entries of their kind"
        return entries.tensor, own.slots


def load_compressed_attention(
    source: WeightSource, spec: CompressedSpec, name: str, layer: int, table: Tensor
) -> CompressedAttention:
    """The attention stored under `name`. The layer behind the last one sees its window alone.

    Ranks share the heads, and with them the groups that project what heads give. Keys, entries and
    the indexer are the same on all of them.
    """
    own, width, eps = spec.attention, spec.hidden_size, spec.norm_eps
    kind = spec.kinds[layer] if layer < spec.layers else LayerKind.SLIDING
    compressor = indexer = None
    if kind is not LayerKind.SLIDING:
        compressor = load_compressor(source, spec, f"{name}.compressor", layer, table)
    if kind is LayerKind.SPARSE:
        indexer = load_entry_indexer(source, spec, f"{name}.indexer", layer, table)
    rows = outputs_of(share := source.mesh.layer)
    check_even(share, own.groups, f"groups of {name}.wo_a")
    down = source.dense(
        f"{name}.wo_a.weight", (own.groups * own.group_rank, own.group_width), cut=rows
    )
    local = replace(own, heads=len(share.of(own.heads)), groups=len(share.of(own.groups)))
    return CompressedAttention(
        spec=local,
        kind=kind,
        layer=layer,
        query_norm_eps=eps,
        q_a=load_linear(source, f"{name}.wq_a", own.q_lora_rank, width),
        q_a_norm=load_wide_norm(source, f"{name}.q_norm", own.q_lora_rank, eps),
        q_b=load_linear(source, f"{name}.wq_b", own.heads * own.head_dim, own.q_lora_rank, rows),
        kv=load_linear(source, f"{name}.wkv", own.head_dim, width),
        kv_norm=load_wide_norm(source, f"{name}.kv_norm", own.head_dim, eps),
        sinks=source.tensor(
            f"{name}.attn_sink", (own.heads,), wide_dtype(source.dtype), inputs_of(share)
        ),
        group_down=down.view(local.groups, own.group_rank, own.group_width),
        output=load_closing_linear(source, f"{name}.wo_b", width, own.groups * own.group_rank),
        compressor=compressor,
        indexer=indexer,
        rope_table=table,
    )
