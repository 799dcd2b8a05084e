# SPDX-License-Identifier: Apache-2.0
"""The routed experts of one layer, in the precision in which a checkpoint stores them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from freewheel import ops
from freewheel.errors import UnsupportedModel
from freewheel.nn.linear import BlockLinear, Linear, Projection
from freewheel.nn.matrix import (
    BLOCK,
    BlockMatrix,
    Matrix,
    PackedMatrix,
    PlainMatrix,
    copy_into,
    place,
    stack,
)
from freewheel.nn.source import WeightSource


@dataclass(frozen=True)
class PlainExperts:
    """Weights in the dtype of computation. With a shared expert, if its two weights are here."""

    gate_up: Tensor  # float [E, 2 * I, H]
    down: Tensor  # float [E, H, I]
    shared_gate_up: Tensor | None = None  # float [2 * J, H]
    shared_down: Tensor | None = None  # float [H, J]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[B, W, H] of x [B, W, H], ids int32 [B, W, top_k] and weights float [B, W, top_k]."""
        return ops.grouped_experts(
            x, self.gate_up, self.down, ids, weights, self.shared_gate_up, self.shared_down
        )


@dataclass(frozen=True)
class ClampedExperts:
    """As `PlainExperts`, with activations that `limit` bounds."""

    gate_up: Tensor  # float [E, 2 * I, H]
    down: Tensor  # float [E, H, I]
    limit: float

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ops.clamped_experts(x, self.gate_up, self.down, ids, weights, self.limit)


@dataclass(frozen=True)
class BlockExperts:
    """Weights that stay in FP8. Activations are clamped if there is a `limit`.

    With a shared expert, if its two weights are here.
    """

    gate_up: Tensor  # float8_e4m3fn [E, 2 * I, H]
    gate_up_scale: Tensor  # float32 [E, 2 * ceil(I / 128), ceil(H / 128)]
    down: Tensor  # float8_e4m3fn [E, H, I]
    down_scale: Tensor  # float32 [E, ceil(H / 128), ceil(I / 128)]
    limit: float | None
    shared_gate_up: BlockLinear | None = None  # [2 * J, H]
    shared_down: BlockLinear | None = None  # [H, J]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = (self.gate_up, self.gate_up_scale, self.down, self.down_scale, ids, weights)
        gate_up, down = self.shared_gate_up, self.shared_down
        if gate_up is None or down is None:
            return ops.block_experts(x, *own, self.limit)
        shared = (gate_up.weight, gate_up.scale, down.weight, down.scale)
        return ops.block_experts(x, *own, self.limit, *shared)


@dataclass(frozen=True)
class PackedExperts:
    """Weights that stay in MXFP4. Activations are clamped if there is a `limit`."""

    gate_up: Tensor  # uint8 [E, 2 * I, H / 2]
    gate_up_scale: Tensor  # uint8 [E, 2 * I, H / 32]
    down: Tensor  # uint8 [E, H, I / 2]
    down_scale: Tensor  # uint8 [E, H, I / 32]
    limit: float | None

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = (self.gate_up, self.gate_up_scale, self.down, self.down_scale, ids, weights)
        return ops.mxfp4_experts(x, *own, self.limit)


Experts = PlainExperts | ClampedExperts | BlockExperts | PackedExperts


def with_shared(experts: Experts, gate_up: Projection, down: Projection) -> Experts | None:
    """`experts` that run a shared one as well; None if no op takes both, stored as they are."""
    match experts, gate_up, down:
        case PlainExperts(), Linear(), Linear():
            return replace(experts, shared_gate_up=gate_up.weight, shared_down=down.weight)
        case BlockExperts(), BlockLinear(), BlockLinear():
            return replace(experts, shared_gate_up=gate_up, shared_down=down)
        case _:
            return None


@dataclass(frozen=True)
class ExpertNames:
    """How a family calls an expert's three projections."""

    gate: str
    up: str
    down: str


def load_experts(
    source: WeightSource,
    name: str,
    parts: ExpertNames,
    experts: int,
    shape: tuple[int, int],
    limit: float | None,
) -> Experts:
    """What is stored under `name`, expert by expert or as two tensors for all of them.

    `shape`: (I, H), an expert's inner and outer width.
    """
    inner, width = shape
    if source.has(f"{name}.gate_up_proj"):
        gate_up = source.matrix(f"{name}.gate_up_proj", (experts, 2 * inner, width))
        _check_halves(name, gate_up, inner)
        down = source.matrix(f"{name}.down_proj", (experts, width, inner))
    else:
        gate_up, down = _load_apart(source, name, parts, experts, shape)
    return _experts(name, gate_up, down, limit)


def _load_apart(
    source: WeightSource, name: str, parts: ExpertNames, experts: int, shape: tuple[int, int]
) -> tuple[Matrix, Matrix]:
    """[experts, 2 * I, H] and [experts, H, I], stored expert by expert.

    The first expert says how all are stored; the others are read straight to their places.
    """
    inner, width = shape
    gate = source.matrix(f"{name}.0.{parts.gate}.weight", (inner, width))
    gate_up = stack(gate, experts, 2)
    copy_into(place(gate_up, 0, 0, 2), gate)
    source.fill(f"{name}.0.{parts.up}.weight", (inner, width), place(gate_up, 0, 1, 2))
    first = source.matrix(f"{name}.0.{parts.down}.weight", (width, inner))
    down = stack(first, experts, 1)
    copy_into(place(down, 0, 0, 1), first)
    for expert in range(1, experts):
        own = f"{name}.{expert}"
        for half, part in enumerate((parts.gate, parts.up)):
            target = place(gate_up, expert, half, 2)
            source.fill(f"{own}.{part}.weight", (inner, width), target)
        source.fill(f"{own}.{parts.down}.weight", (width, inner), place(down, expert, 0, 1))
    source.settle()
    return gate_up, down


def _check_halves(name: str, gate_up: Matrix, inner: int) -> None:
    """The scales of a joined tensor run over both halves: the second must begin a block."""
    if isinstance(gate_up, BlockMatrix) and inner % BLOCK:
        raise UnsupportedModel(
            f"{name}.gate_up_proj: a block of {BLOCK} rows lies across its two halves "
            f"of {inner}; convert it to bf16"
        )


def _experts(name: str, gate_up: Matrix, down: Matrix, limit: float | None) -> Experts:
    match gate_up, down:
        case PlainMatrix(), PlainMatrix():
            if limit is None:
                return PlainExperts(gate_up.values, down.values)
            return ClampedExperts(gate_up.values, down.values, limit)
        case BlockMatrix(), BlockMatrix():
            return BlockExperts(gate_up.values, gate_up.scale, down.values, down.scale, limit)
        case PackedMatrix(), PackedMatrix():
            return PackedExperts(gate_up.values, gate_up.scale, down.values, down.scale, limit)
        case _:
            raise UnsupportedModel(
                f"{name}: gate and up are stored as {gate_up.storage}, down as {down.storage}; "
                "experts of one layer must be stored alike"
            )
