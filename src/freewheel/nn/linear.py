# SPDX-License-Identifier: Apache-2.0
"""Projections: token to vector, vector to vector, vector to logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel import ops
from freewheel.errors import UnsupportedModel
from freewheel.nn.cut import Cut, inputs_of, outputs_of
from freewheel.nn.matrix import BlockMatrix, Matrix, PackedMatrix, PlainMatrix, join_rows
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.nn.summed import Summed, summed
from freewheel.spec.mesh import LAYER_RANKS


@dataclass(frozen=True)
class Linear:
    """x @ weight^T. In float32 (or float64) if the weight is, whatever x is."""

    weight: Tensor  # float [out, in]

    def __call__(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        if x.dtype != self.weight.dtype:
            return ops.wide_linear(x, self.weight)
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class BlockLinear:
    """x @ weight^T with a weight that stays in FP8; x keeps its own precision."""

    weight: Tensor  # float8_e4m3fn [out, in]
    scale: Tensor  # float32 [ceil(out / 128), ceil(in / 128)]

    def __call__(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return ops.block_linear(x, self.weight, self.scale)


@dataclass(frozen=True)
class SplitLinear:
    """Rows that cannot be joined into one matrix: as many products, side by side."""

    parts: tuple[Linear | BlockLinear, ...]

    def __call__(self, x: Tensor) -> Tensor:  # [..., in] -> [..., sum of out]
        return torch.cat([part(x) for part in self.parts], dim=-1)


Projection = Linear | BlockLinear | SplitLinear | Summed[Linear | BlockLinear | SplitLinear]
"""Whatever maps [..., in] to [..., out]."""


@dataclass(frozen=True)
class StackedLinear:
    """Projections of one input as one: it is read once, and a wide product fills a device better.

    `parts`: outputs of each, 0 for one that a layer does not have.
    """

    joined: Projection  # [sum of parts, in]
    parts: tuple[int, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:  # [..., in] -> [..., part] each
        return self.joined(x).split(self.parts, dim=-1)


@dataclass(frozen=True)
class Embedding:
    """Rows of a table."""

    weight: Tensor  # float [V, H]

    def __call__(self, tokens: Tensor) -> Tensor:  # int32 [B, W] -> [B, W, H]
        return F.embedding(tokens, self.weight)


@dataclass(frozen=True)
class SplitEmbedding:
    """Rows of a table of which other ranks hold the rest: zeros for their tokens."""

    weight: Tensor  # float [V / ranks, H]
    first: int

    def __call__(self, tokens: Tensor) -> Tensor:  # int32 [B, W] -> [B, W, H]
        return ops.split_embedding(tokens, self.weight, self.first)


TokenTable = Embedding | Summed[SplitEmbedding]
"""Whatever maps int32 [B, W] to [B, W, H]."""


@dataclass(frozen=True)
class Head:
    """Logits over the vocabulary, in float32 (float64 in a float64 model)."""

    weight: Tensor  # float [V, H]

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., H] -> float [..., V]
        return F.linear(hidden, self.weight).to(wide_dtype(hidden.dtype))


@dataclass(frozen=True)
class SplitHead:
    """As `Head`; every rank computes its part of the vocabulary and gets all logits."""

    weight: Tensor  # float [V / ranks, H]
    ranks: int

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., H] -> float [..., V]
        own = F.linear(hidden, self.weight)  # [..., V / ranks]
        return ops.all_gather(own, self.ranks, LAYER_RANKS).to(wide_dtype(hidden.dtype))


TokenHead = Head | SplitHead
"""Whatever maps [..., H] to float [..., V]."""


def load_linear(
    source: WeightSource, name: str, outputs: int, inputs: int, cut: Cut | None = None
) -> Linear | BlockLinear | SplitLinear:
    """`name`.weight [outputs, inputs], in the precision in which it is stored, or a cut of it."""
    return load_joined(source, (name,), (outputs,), inputs, cut)


def load_closing_linear(source: WeightSource, name: str, outputs: int, inputs: int) -> Projection:
    """As `load_linear`, of inputs of which every rank has its share; their products are summed."""
    cut = inputs_of(source.mesh.layer)
    return summed(load_linear(source, name, outputs, inputs, cut), source.mesh)


def load_joined(
    source: WeightSource,
    names: tuple[str, ...],
    outputs: tuple[int, ...],
    inputs: int,
    cut: Cut | None = None,
) -> Linear | BlockLinear | SplitLinear:
    """The projections of one input stored under `names`, one above the other; a cut of each."""
    return _join(source, names, outputs, inputs, dict.fromkeys(names, cut))


def _join(
    source: WeightSource,
    names: tuple[str, ...],
    outputs: tuple[int, ...],
    inputs: int,
    cuts: Mapping[str, Cut | None],
) -> Linear | BlockLinear | SplitLinear:
    parts = tuple(
        source.matrix(f"{name}.weight", (rows, inputs), cuts.get(name))
        for name, rows in zip(names, outputs, strict=True)
    )
    whole = parts[0] if len(parts) == 1 else join_rows(parts)
    if whole is None:
        return SplitLinear(tuple(map(_linear, parts, names)))
    return _linear(whole, names[0])


def _linear(matrix: Matrix, name: str) -> Linear | BlockLinear:
    match matrix:
        case PlainMatrix():
            return Linear(matrix.values)
        case BlockMatrix():
            return BlockLinear(matrix.values, matrix.scale)
        case PackedMatrix():
            raise UnsupportedModel(
                f"{name}.weight: stored as {matrix.storage}, which is supported for routed experts "
                "only; convert it to fp8 or bf16"
            )


def load_stacked_linear(
    source: WeightSource,
    parts: Sequence[tuple[str, int]],
    inputs: int,
    shared: tuple[str, ...] = (),
) -> StackedLinear:
    """`name`.weight [outputs, inputs] of each (name, outputs), in this order; none of 0 outputs.

    `shared`: names of parts of which every rank computes its share of the outputs.
    """
    names, outputs = zip(*(part for part in parts if part[1]), strict=True)
    cut = outputs_of(source.mesh.layer)
    cuts = dict.fromkeys(shared, cut)
    joined = _join(source, names, outputs, inputs, cuts)
    counts = tuple(
        count if cut is None or name not in shared else cut.length(count) for name, count in parts
    )
    return StackedLinear(joined, counts)


def load_wide_linear(source: WeightSource, name: str, outputs: int, inputs: int) -> Linear:
    """As `load_linear`, but computed in float32: for weights that decide rather than transform."""
    return Linear(source.dense(f"{name}.weight", (outputs, inputs), wide_dtype(source.dtype)))


def load_embedding(source: WeightSource, name: str, vocab: int, width: int) -> TokenTable:
    """`name`.weight [vocab, width], or this rank's part of it."""
    share = source.mesh.layer
    weight = source.tensor(f"{name}.weight", (vocab, width), cut=outputs_of(share))
    if share.count == 1:
        return Embedding(weight)
    return Summed(SplitEmbedding(weight, share.of(vocab).start), LAYER_RANKS)


def load_head(
    source: WeightSource, name: str, vocab: int, width: int, tied: TokenTable | None = None
) -> TokenHead:
    """`name`.weight [vocab, width]; the embedding's where the checkpoint ties them and has none."""
    share = source.mesh.layer
    if tied is not None and not source.has(f"{name}.weight"):
        weight = tied.part.weight if isinstance(tied, Summed) else tied.weight
    else:
        weight = source.tensor(f"{name}.weight", (vocab, width), cut=outputs_of(share))
    return Head(weight) if share.count == 1 else SplitHead(weight, share.count)
