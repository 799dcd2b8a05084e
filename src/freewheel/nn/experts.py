# SPDX-License-Identifier: Apache-2.0
"""The routed experts of one layer, in the precision in which a checkpoint stores them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freewheel import ops
from freewheel.errors import UnsupportedModel
from freewheel.nn.cut import EXPERTS, Cut, check_even, inputs_of, outputs_of
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
from freewheel.nn.spread import Dealing, SpreadExperts
from freewheel.spec.mesh import Mesh


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
    """Weights that stay in MXFP4. Activations are clamped if there is a `limit`.

    With a shared expert in FP8, if its two weights are here.
    """

    gate_up: Tensor  # uint8 [E, 2 * I, H / 2]
    gate_up_scale: Tensor  # uint8 [E, 2 * I, H / 32]
    down: Tensor  # uint8 [E, H, I / 2]
    down_scale: Tensor  # uint8 [E, H, I / 32]
    limit: float | None
    shared_gate_up: BlockLinear | None = None  # [2 * J, H]
    shared_down: BlockLinear | None = None  # [H, J]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = (self.gate_up, self.gate_up_scale, self.down, self.down_scale, ids, weights)
        gate_up, down = self.shared_gate_up, self.shared_down
        if gate_up is None or down is None:
            return ops.mxfp4_experts(x, *own, self.limit)
        shared = (gate_up.weight, gate_up.scale, down.weight, down.scale)
        return ops.mxfp4_experts(x, *own, self.limit, *shared)


@dataclass(frozen=True)
class RepackedExperts:
    """As `PackedExperts`, in the order in which a GPU's warps read them (`ops.repack_mxfp4`)."""

    gate_up: Tensor  # uint8 [E, 2 * I / 16, H / 128, 1088]
    down: Tensor  # uint8 [E, H / 16, I / 128, 1088]
    limit: float | None
    shared_gate_up: BlockLinear | None = None  # [2 * J, H]
    shared_down: BlockLinear | None = None  # [H, J]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = (self.gate_up, self.down, ids, weights)
        gate_up, down = self.shared_gate_up, self.shared_down
        if gate_up is None or down is None:
            return ops.repacked_experts(x, *own, self.limit)
        shared = (gate_up.weight, gate_up.scale, down.weight, down.scale)
        return ops.repacked_experts(x, *own, self.limit, *shared)


StoredExperts = PlainExperts | ClampedExperts | BlockExperts | PackedExperts | RepackedExperts


@dataclass(frozen=True)
class DealtExperts:
    """Some of the experts, as other ranks hold the others, whose results are to be added."""

    experts: StoredExperts
    first: int
    count: int

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ids, weights = ops.own_experts(ids, weights, self.first, self.count)
        return self.experts(x, ids, weights)


Experts = StoredExperts | DealtExperts | SpreadExperts


def with_shared(experts: Experts, gate_up: Projection, down: Projection) -> Experts | None:
    """`experts` that run a shared one as well; None if no op takes both, stored as they are."""
    match experts, gate_up, down:
        case DealtExperts(), _, _:
            inner = with_shared(experts.experts, gate_up, down)
            if inner is None or isinstance(inner, DealtExperts | SpreadExperts):
                return None
            return replace(experts, experts=inner)
        case PlainExperts(), Linear(), Linear():
            return replace(experts, shared_gate_up=gate_up.weight, shared_down=down.weight)
        case BlockExperts() | PackedExperts() | RepackedExperts(), BlockLinear(), BlockLinear():
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

    `shape`: (I, H), an expert's inner and outer width. Ranks share each expert's width, or the
    experts, as the mesh says.
    """
    dealt = source.mesh.experts
    check_even(dealt, experts, f"experts of {name}")
    if source.has(f"{name}.gate_up_proj"):
        gate_up, down = _load_together(source, name, experts, shape)
    else:
        gate_up, down = _load_apart(source, name, parts, experts, shape)
    own = _experts(name, gate_up, down, limit)
    if isinstance(own, PackedExperts):
        own = _repacked(own, source)
    return _spread(own, experts, source.mesh)


def _repacked(own: PackedExperts, source: WeightSource) -> PackedExperts | RepackedExperts:
    """`own` in the order of the kernels that run them; as they are where there are none.

    Those are for bfloat16, and for experts that fall into whole pieces.
    """
    outputs, inputs = own.down.shape[1], 2 * own.down.shape[2]
    whole = ops.repackable(outputs, inputs) and ops.repackable(2 * inputs, outputs)
    lacking = ops.kernels_lack(source.device.type) is not None
    if lacking or not whole or source.dtype != torch.bfloat16:
        return own
    gate_up = ops.repack_mxfp4(own.gate_up, own.gate_up_scale, True)
    return RepackedExperts(gate_up, ops.repack_mxfp4(own.down, own.down_scale, False), own.limit)


def _spread(own: StoredExperts, experts: int, mesh: Mesh) -> Experts:
    """This rank's `own` of `experts` experts, behind whatever tokens have to go through."""
    held, ranks = mesh.experts.of(experts), mesh.dp
    if mesh.experts.count == 1:
        return own if ranks == 1 else SpreadExperts(own, ranks)
    dealt = DealtExperts(own, held.start, len(held))
    if ranks == 1:
        return dealt
    first = mesh.layer.index * len(held)
    return SpreadExperts(dealt, ranks, own, Dealing(first, mesh.tp * len(held), len(held)))


def _load_together(
    source: WeightSource, name: str, experts: int, shape: tuple[int, int]
) -> tuple[Matrix, Matrix]:
    """[experts, 2 * I, H] and [experts, H, I], stored as two tensors."""
    (inner, width), dealt, wide = shape, source.mesh.experts, source.mesh.expert_width
    cuts: tuple[Cut | None, Cut | None] = (outputs_of(wide, 2), inputs_of(wide))
    if dealt.count > 1:
        cuts = (Cut(dealt, EXPERTS), Cut(dealt, EXPERTS))
    gate_up = source.matrix(f"{name}.gate_up_proj", (experts, 2 * inner, width), cuts[0])
    _check_halves(name, gate_up, inner)
    return gate_up, source.matrix(f"{name}.down_proj", (experts, width, inner), cuts[1])


def _load_apart(
    source: WeightSource, name: str, parts: ExpertNames, experts: int, shape: tuple[int, int]
) -> tuple[Matrix, Matrix]:
    """[experts, 2 * I, H] and [experts, H, I], stored expert by expert, of this rank's experts.

    The first expert says how all are stored; the others are read straight to their places.
    """
    (inner, width), held = shape, source.mesh.experts.of(experts)
    rows, columns = outputs_of(source.mesh.expert_width), inputs_of(source.mesh.expert_width)
    for expert in set(range(experts)).difference(held):
        for part in (parts.gate, parts.up):
            source.elsewhere(f"{name}.{expert}.{part}.weight", (inner, width))
        source.elsewhere(f"{name}.{expert}.{parts.down}.weight", (width, inner))
    own = f"{name}.{held.start}"
    gate = source.matrix(f"{own}.{parts.gate}.weight", (inner, width), rows)
    gate_up = stack(gate, len(held), 2)
    copy_into(place(gate_up, 0, 0, 2), gate)
    source.fill(f"{own}.{parts.up}.weight", (inner, width), place(gate_up, 0, 1, 2), rows)
    first = source.matrix(f"{own}.{parts.down}.weight", (width, inner), columns)
    down = stack(first, len(held), 1)
    copy_into(place(down, 0, 0, 1), first)
    for at, expert in enumerate(held[1:], 1):
        own = f"{name}.{expert}"
        for half, part in enumerate((parts.gate, parts.up)):
            target = place(gate_up, at, half, 2)
            source.fill(f"{own}.{part}.weight", (inner, width), target, rows)
        target = place(down, at, 0, 1)
        source.fill(f"{own}.{parts.down}.weight", (width, inner), target, columns)
    source.settle()
    return gate_up, down


def _check_halves(name: str, gate_up: Matrix, inner: int) -> None:
    """The scales of a joined tensor run over both halves: the second must begin a block."""
    if isinstance(gate_up, BlockMatrix) and inner % BLOCK:
        raise UnsupportedModel(
            f"{name}.gate_up_proj: a block of {BLOCK} rows lies across its two halves "
            f"of {inner}; convert it to bf16"
        )


def _experts(name: str, gate_up: Matrix, down: Matrix, limit: float | None) -> StoredExperts:
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
