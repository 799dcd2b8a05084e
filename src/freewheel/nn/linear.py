# SPDX-License-Identifier: Apache-2.0
"""Projections: token to vector, vector to vector, vector to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel import ops
from freewheel.nn.source import WeightSource, wide_dtype


@dataclass(frozen=True)
class Linear:
    """x @ weight^T. In float32 (or float64) if the weight is, whatever x is."""

    weight: Tensor  # float [out, in]

    def __call__(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        if x.dtype != self.weight.dtype:
            return ops.wide_linear(x, self.weight)
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class StackedLinear:
    """Projections of one input as one: it is read once, and a wide product fills a device better.

    `parts`: outputs of each, 0 for one that a layer does not have.
    """

    joined: Linear  # [sum of parts, in]
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
class Head:
    """Logits over the vocabulary, in float32 (float64 in a float64 model)."""

    weight: Tensor  # float [V, H]

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., H] -> float [..., V]
        return F.linear(hidden, self.weight).to(wide_dtype(hidden.dtype))


def load_linear(source: WeightSource, name: str, outputs: int, inputs: int) -> Linear:
    """`name`.weight [outputs, inputs]."""
    return Linear(source.tensor(f"{name}.weight", (outputs, inputs)))


def load_stacked_linear(
    source: WeightSource, parts: Sequence[tuple[str, int]], inputs: int
) -> StackedLinear:
    """`name`.weight [outputs, inputs] of each (name, outputs), in this order; none of 0 outputs."""
    outputs = [count for _, count in parts]
    weight = torch.empty(sum(outputs), inputs, dtype=source.dtype, device=source.device)
    for (name, count), rows in zip(parts, weight.split(outputs), strict=True):
        if count:
            rows.copy_(source.tensor(f"{name}.weight", (count, inputs)))
    return StackedLinear(Linear(weight), tuple(outputs))


def load_wide_linear(source: WeightSource, name: str, outputs: int, inputs: int) -> Linear:
    """As `load_linear`, but computed in float32: for weights that decide rather than transform."""
    weight = source.tensor(f"{name}.weight", (outputs, inputs), wide_dtype(source.dtype))
    return Linear(weight)


def load_embedding(source: WeightSource, name: str, vocab: int, width: int) -> Embedding:
    """`name`.weight [vocab, width]."""
    return Embedding(source.tensor(f"{name}.weight", (vocab, width)))


def load_head(
    source: WeightSource, name: str, vocab: int, width: int, tied: Embedding | None
) -> Head:
    """`name`.weight [vocab, width]; the embedding's where the checkpoint ties them and has none."""
    if tied is not None and not source.has(f"{name}.weight"):
        return Head(tied.weight)
    return Head(source.tensor(f"{name}.weight", (vocab, width)))
