# SPDX-License-Identifier: Apache-2.0
"""The first step of an attention over entries: all that is projected from its input, and stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel import ops
from freewheel.nn.compressor import Compressor, load_compressor, load_index_compressor
from freewheel.nn.linear import (
    BlockLinear,
    Linear,
    SplitLinear,
    load_joined,
    load_wide_linear,
)
from freewheel.nn.matrix import concat_rows
from freewheel.nn.norm_rope import Norm, load_wide_norm
from freewheel.nn.rows import Keys, PlainIndexKeys, PlainKeys, index_keys_of, keys_of, tensor_of
from freewheel.nn.sight import EntrySight
from freewheel.nn.source import WeightSource
from freewheel.spec.compressed import CompressedSpec, LayerKind
from freewheel.spec.entry_groups import ENTRY, INDEX_ENTRY, KEY, WINDOW
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class StreamInputs:
    """Query latents, keys, raw rows and the gates of index heads, read from x together.

    `gates` stays in float32: rounding it changes which entries are kept.
    """

    layer: int
    joined: Linear | BlockLinear | SplitLinear  # [q_lora + head_dim, H]
    raw: Tensor | None  # float [2C + 2C', H]  of the compressors
    gates: Tensor | None  # float32 [Hi, H]
    gate_scale: float
    query_norm: Norm
    key_norm: Norm
    compressor: Compressor | None
    index_compressor: Compressor | None
    rope_table: Tensor  # float32 [T, rope]

    def __call__(
        self, x: Tensor, view: StepView, cache: CachePool, sight: EntrySight | None
    ) -> tuple[Tensor, Tensor]:
        """Normed query latents [B, W, q_lora] and gates float [B, W, Hi] of x [B, W, H].

        Keys, raw rows and the entries that they complete are stored. `sight`: of the layer's kind
        of entries, if it has any.
        """
        products, keys = self._products(x), keys_of(cache, KEY, self.layer)
        if not isinstance(keys, PlainKeys) or self._packs_index(cache):
            return self._place_apart(products.sum(0), x.dtype, keys, view, cache, sight)
        latent, gates = ops.place_inputs(
            products,
            x.dtype,
            keys.tensor,
            self.query_norm.weight,
            self.key_norm.weight,
            self.key_norm.eps,
            view.positions,
            self.rope_table,
            view.write_slots[WINDOW],
            self.gate_scale,
            *self._entries(view, cache, sight),
        )
        return latent, gates

    def _packs_index(self, cache: CachePool) -> bool:
        """This layer's index entries are not stored as they are."""
        if self.index_compressor is None:
            return False
        return not isinstance(index_keys_of(cache, INDEX_ENTRY, self.layer), PlainIndexKeys)

    def _products(self, x: Tensor) -> Tensor:
        """float [P, B, W, q_lora + head_dim + 2C + 2C' + Hi]: the sum over P."""
        own, inputs = self.joined, x.shape[-1]
        parts = ops.parts_for(x.numel() // inputs, inputs)
        if isinstance(own, Linear):
            return ops.shared_products(x, own.weight, None, self.raw, self.gates, parts)
        if isinstance(own, BlockLinear):
            return ops.shared_products(x, own.weight, own.scale, self.raw, self.gates, parts)
        rows = [] if self.raw is None else [ops.project_raw(x, self.raw)]
        gates = [] if self.gates is None else [ops.wide_linear(x, self.gates)]
        return torch.cat([own(x), *rows, *gates], -1)[None]

    def _entries(
        self, view: StepView, cache: CachePool, sight: EntrySight | None
    ) -> tuple[Tensor | None, ...]:
        """Arguments of `ops.place_inputs` from `entries` on."""
        own, more = self.compressor, self.index_compressor
        if own is None or sight is None:
            return ()
        kinds: tuple[Tensor | None, ...] = (None,) * 4
        if more is not None:
            kinds = (tensor_of(cache, INDEX_ENTRY, self.layer), *more.arguments(cache))
        into = (tensor_of(cache, ENTRY, self.layer), *own.arguments(cache), *kinds)
        slots = view.write_slots[sight.places.tail]
        return *into, slots, sight.windows, sight.write_slots, sight.raw_slots

    def _place_apart(
        self,
        total: Tensor,
        dtype: torch.dtype,
        keys: Keys,
        view: StepView,
        cache: CachePool,
        sight: EntrySight | None,
    ) -> tuple[Tensor, Tensor]:
        """The same, in an op for each step, over rows that are not stored as they are."""
        counts = (len(self.query_norm.weight), len(self.key_norm.weight))
        query, key, rest = total.split((*counts, total.shape[-1] - sum(counts)), -1)
        key = key.to(dtype)
        keys.place(
            key[:, :, None][:, :, :0],
            self.query_norm.eps,
            key,
            self.key_norm.weight,
            self.key_norm.eps,
            view.positions,
            self.rope_table,
            view.write_slots[WINDOW],
        )
        entries = keys_of(cache, ENTRY, self.layer) if self.compressor else None
        index = index_keys_of(cache, INDEX_ENTRY, self.layer) if self.index_compressor else None
        for own, into in ((self.compressor, entries), (self.index_compressor, index)):
            if own is not None and into is not None and sight is not None:
                values, rest = rest.tensor_split((2 * own.channels,), -1)
                own.store(values, into, view, cache, sight)
        return self.query_norm(query.to(dtype)), rest * self.gate_scale


def load_stream_inputs(
    source: WeightSource,
    spec: CompressedSpec,
    name: str,
    layer: int,
    kind: LayerKind,
    table: Tensor,
) -> StreamInputs:
    """Of the attention stored under `name`, which sees entries of `kind`: alike on all ranks."""
    own, index, width, eps = spec.attention, spec.indexer, spec.hidden_size, spec.norm_eps
    compressor = index_compressor = gates = None
    raw: list[Tensor] = []
    if kind is not LayerKind.SLIDING:
        compressor, rows = load_compressor(source, spec, f"{name}.compressor", layer, table)
        raw.append(rows)
    if kind is LayerKind.SPARSE:
        indexer = f"{name}.indexer"
        index_compressor, rows = load_index_compressor(
            source, spec, f"{indexer}.compressor", layer, table
        )
        raw.append(rows)
        gates = load_wide_linear(source, f"{indexer}.weights_proj", index.heads, width).weight
    names, outputs = (f"{name}.wq_a", f"{name}.wkv"), (own.q_lora_rank, own.head_dim)
    return StreamInputs(
        layer=layer,
        joined=load_joined(source, names, outputs, width),
        raw=concat_rows(tuple(raw)) if raw else None,
        gates=gates,
        gate_scale=(index.heads * index.dim) ** -0.5,
        query_norm=load_wide_norm(source, f"{name}.q_norm", own.q_lora_rank, eps),
        key_norm=load_wide_norm(source, f"{name}.kv_norm", own.head_dim, eps),
        compressor=compressor,
        index_compressor=index_compressor,
        rope_table=table,
    )
