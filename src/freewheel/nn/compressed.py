# SPDX-License-Identifier: Apache-2.0
"""Attention whose one head of keys is also its values, over a window and over entries.

DeepSeek-V4 report, section 2.3. Keys are rotated, so the values are: what the attention returns is
turned back by the query's own angle, and each value counts by its distance alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freewheel import ops
from freewheel.nn.cut import check_even, inputs_of, outputs_of
from freewheel.nn.entry_indexer import EntryIndexer
from freewheel.nn.linear import (
    BlockLinear,
    Linear,
    Projection,
    SplitLinear,
    StackedLinear,
    load_closing_linear,
    load_linear,
    load_stacked_linear,
)
from freewheel.nn.rows import keys_of, tensor_of
from freewheel.nn.sight import EntrySight, Sight
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.nn.stream_inputs import StreamInputs, load_stream_inputs
from freewheel.spec.compressed import CompressedSpec, LayerKind, SharedKvSpec
from freewheel.spec.entry_groups import ENTRY, KEY
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class GroupedLinear:
    """Each group of inputs through a weight of its own."""

    weight: Tensor  # float [groups, out, in]

    def __call__(self, x: Tensor) -> Tensor:  # [B, W, groups * in] -> [B, W, groups * out]
        grouped = x.unflatten(-1, (self.weight.shape[0], -1))
        return torch.einsum("bwgi,gri->bwgr", grouped, self.weight).flatten(2)


@dataclass(frozen=True)
class CompressedAttention:
    """One layer's. Without entries it sees its window alone; with an indexer, picked entries; with
    entries alone, all of them."""

    spec: SharedKvSpec
    kind: LayerKind
    layer: int
    query_norm_eps: float
    inputs: StreamInputs
    up: StackedLinear  # [heads * head_dim | Hi * Di, q_lora]
    sinks: Tensor  # float32 [heads]
    group_down: GroupedLinear | Linear | BlockLinear | SplitLinear
    output: Projection  # [H, groups * group_rank]
    indexer: EntryIndexer | None
    rope_table: Tensor  # float32 [T, rope]

    def __call__(self, x: Tensor, view: StepView, cache: CachePool, sight: Sight) -> Tensor:
        """Attention output [B, W, H] of x [B, W, H]."""
        spec, table = self.spec, self.rope_table
        own = sight.entries.get(self.kind)
        latent, gates = self.inputs(x, view, cache, own)  # [B, W, q_lora], float [B, W, Hi]
        heads, dim = (0, 2) if self.indexer is None else self.indexer.heads
        query, index_query = ops.open_queries(
            self.up.joined(latent),
            spec.head_dim,
            self.query_norm_eps,
            heads,
            dim,
            view.positions,
            table,
        )  # [B, W, heads, head_dim], [B, W, Hi, Di]
        keys = keys_of(cache, KEY, self.layer)
        entries, picks = keys.tensor, sight.nothing
        if own is not None:
            entries = tensor_of(cache, ENTRY, self.layer)
            picks = self._pick(index_query, gates, view, cache, own)
        mixed = keys.attend(
            query,
            sight.window,
            entries,
            picks,
            self.sinks,
            spec.scale,
            view.positions,
            table,
        )  # [B, W, heads, head_dim]
        return self.output(self.group_down(mixed.flatten(2)))

    def _pick(
        self, query: Tensor, gates: Tensor, view: StepView, cache: CachePool, own: EntrySight
    ) -> Tensor:
        """int32 [B, W, E]: slots of the entries attended to, -1 padded."""
        if self.indexer is not None:
            return self.indexer.select(query, gates, view, cache, own)
        assert own.slots is not None, "layers without an indexer see all entries of their kind"
        return own.slots


def load_compressed_attention(
    source: WeightSource, spec: CompressedSpec, name: str, layer: int, table: Tensor
) -> CompressedAttention:
    """The attention stored under `name`. The layer behind the last one sees its window alone.

    Ranks share the heads, and with them the groups that project what heads give. Keys, entries and
    the indexer are the same on all of them.
    """
    own, index, width = spec.attention, spec.indexer, spec.hidden_size
    kind = spec.kinds[layer] if layer < spec.layers else LayerKind.SLIDING
    sparse = kind is LayerKind.SPARSE
    indexer = EntryIndexer(index, layer, source.mesh.scan) if sparse else None
    query = index.heads * index.dim if indexer else 0
    share = source.mesh.layer
    local = replace(own, heads=len(share.of(own.heads)), groups=len(share.of(own.groups)))
    up = ((f"{name}.wq_b", own.heads * own.head_dim), (f"{name}.indexer.wq_b", query))
    return CompressedAttention(
        spec=local,
        kind=kind,
        layer=layer,
        query_norm_eps=spec.norm_eps,
        inputs=load_stream_inputs(source, spec, name, layer, kind, table),
        up=load_stacked_linear(source, up, own.q_lora_rank, (f"{name}.wq_b",)),
        sinks=source.tensor(
            f"{name}.attn_sink", (own.heads,), wide_dtype(source.dtype), inputs_of(share)
        ),
        group_down=_load_group_down(source, own, f"{name}.wo_a"),
        output=load_closing_linear(source, f"{name}.wo_b", width, own.groups * own.group_rank),
        indexer=indexer,
        rope_table=table,
    )


def _load_group_down(
    source: WeightSource, own: SharedKvSpec, name: str
) -> GroupedLinear | Linear | BlockLinear | SplitLinear:
    """This rank's groups of `name`; a single one stays in the precision in which it is stored."""
    share, rows = source.mesh.layer, own.groups * own.group_rank
    check_even(share, own.groups, f"groups of {name}")
    if len(share.of(own.groups)) == 1:
        return load_linear(source, name, rows, own.group_width, outputs_of(share))
    weight = source.dense(f"{name}.weight", (rows, own.group_width), cut=outputs_of(share))
    return GroupedLinear(weight.view(-1, own.group_rank, own.group_width))
