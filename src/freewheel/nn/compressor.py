# SPDX-License-Identifier: Apache-2.0
"""Mixes the tokens of a window into one entry (DeepSeek-V4 report, sections 2.3.1 and 2.3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel.nn.matrix import concat_rows
from freewheel.nn.norm_rope import Norm, load_wide_norm
from freewheel.nn.rows import IndexKeys, Keys
from freewheel.nn.sight import EntrySight
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.spec.compressed import CompressedSpec, LayerKind
from freewheel.spec.entry_groups import INDEX_RAW, RAW
from freewheel.state import CachePool, StepView


@dataclass(frozen=True)
class Compressor:
    """One layer's, of its attention or of its indexer. What is projected for it is float32.

    C channels: the entry's, or two for each of them where windows overlap: the first half serves
    the window after, the second half the own one.
    """

    layer: int
    raw_field: str
    bias: Tensor  # float32 [ratio, C]
    norm: Norm
    rope_table: Tensor  # float32 [T, rope]

    @property
    def channels(self) -> int:
        """C."""
        return self.bias.shape[1]

    def arguments(self, cache: CachePool) -> tuple[Tensor, Tensor, Tensor]:
        """Raw rows, bias and the weight of the norm, as `ops.place_inputs` takes them."""
        return cache.layer(self.raw_field, self.layer), self.bias, self.norm.weight

    def store(
        self,
        values: Tensor,
        entries: Keys | IndexKeys,
        view: StepView,
        cache: CachePool,
        sight: EntrySight,
    ) -> None:
        """Store raw rows, float [B, W, 2 * C], and, in `entries`, those that they complete."""
        entries.store_entries(
            cache.layer(self.raw_field, self.layer),
            values.contiguous(),
            view.positions,
            view.write_slots[sight.places.tail],
            self.bias,
            self.norm.weight,
            self.norm.eps,
            self.rope_table,
            sight.windows,
            sight.write_slots,
            sight.raw_slots,
        )


def load_compressor(
    source: WeightSource, spec: CompressedSpec, name: str, layer: int, table: Tensor
) -> tuple[Compressor, Tensor]:
    """The one of a layer's attention, stored under `name`, and its projection [2 * C, H]."""
    return _load(source, spec, name, layer, table, spec.attention.head_dim, RAW)


def load_index_compressor(
    source: WeightSource, spec: CompressedSpec, name: str, layer: int, table: Tensor
) -> tuple[Compressor, Tensor]:
    """The one of a layer's indexer, stored under `name`, and its projection [2 * C, H]."""
    return _load(source, spec, name, layer, table, spec.indexer.dim, INDEX_RAW)


def _load(
    source: WeightSource,
    spec: CompressedSpec,
    name: str,
    layer: int,
    table: Tensor,
    dim: int,
    raw_field: str,
) -> tuple[Compressor, Tensor]:
    kind, dtype = spec.kinds[layer], wide_dtype(source.dtype)
    channels = 2 * dim if kind is LayerKind.SPARSE else dim
    shape = (channels, spec.hidden_size)
    parts = tuple(source.dense(f"{name}.{part}.weight", shape) for part in ("wkv", "wgate"))
    own = Compressor(
        layer=layer,
        raw_field=raw_field,
        bias=source.tensor(f"{name}.ape", (spec.ratio(kind), channels), dtype),
        norm=load_wide_norm(source, f"{name}.norm", dim, spec.norm_eps),
        rope_table=table,
    )
    return own, concat_rows(parts)
