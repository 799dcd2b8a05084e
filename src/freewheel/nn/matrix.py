# SPDX-License-Identifier: Apache-2.0
"""Weights in the precision in which a checkpoint stores them: one class for each storage.

A matrix maps K inputs to N outputs. Leading dimensions count experts. What holds a matrix chooses
its op by the matrix's class; nothing else asks how weights are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freewheel import ops

BLOCK = 128
"""Rows and columns that one scale of an FP8 weight covers."""

GROUP = 32
"""Inputs that one scale of an MXFP4 weight covers."""


@dataclass(frozen=True)
class PlainMatrix:
    """Numbers in the dtype of computation."""

    values: Tensor  # float [..., N, K]

    @property
    def storage(self) -> str:
        """What the numbers are, for people."""
        return str(self.values.dtype).removeprefix("torch.")

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers themselves, dtype [..., N, K]."""
        return self.values.to(dtype)


@dataclass(frozen=True)
class BlockMatrix:
    """FP8 numbers and a factor for each block of them (DeepSeek-V3, section 3.3).

    Blocks at the edge may be partly empty.
    """

    values: Tensor  # float8_e4m3fn [..., N, K]
    scale: Tensor  # float32 [..., ceil(N / 128), ceil(K / 128)]

    @property
    def storage(self) -> str:
        """What the numbers are, for people."""
        return f"fp8 in blocks of {BLOCK} x {BLOCK}"

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values, self.scale)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Number times factor, dtype [..., N, K]."""
        return ops.dequantise_blocks(self.values, self.scale, dtype=dtype)


@dataclass(frozen=True)
class PackedMatrix:
    """MXFP4: two e2m1 numbers a byte, and a power of two for 32 inputs (OCP Microscaling 1.0)."""

    values: Tensor  # uint8 [..., N, K / 2]
    scale: Tensor  # uint8 [..., N, K / 32]  E8M0: 2^(e - 127)

    @property
    def storage(self) -> str:
        """What the numbers are, for people."""
        return "mxfp4"

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values, self.scale)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Number times its group's power of two, dtype [..., N, K]."""
        return ops.dequantise_mxfp4(self.values, self.scale, dtype=dtype)


Matrix = PlainMatrix | BlockMatrix | PackedMatrix


def stack(first: Matrix, experts: int, parts: int) -> Matrix:
    """Room for `experts` times `parts` matrices like `first`: rows [part 0 | part 1 | ..]."""
    rooms = [t.new_empty(experts, parts * t.shape[0], *t.shape[1:]) for t in first.tensors()]
    return _of(first, rooms)


def place(stacked: Matrix, expert: int, part: int, parts: int) -> Matrix:
    """Where matrix `part` of `expert` lies in what `stack` made."""
    views = [t[expert].tensor_split(parts)[part] for t in stacked.tensors()]
    return _of(stacked, views)


def copy_into(target: Matrix, found: Matrix) -> None:
    """Copy `found` to where `target` lies; both are of one class and shape."""
    for own, other in zip(target.tensors(), found.tensors(), strict=True):
        own.copy_(other)


def join_rows(parts: tuple[Matrix, ...]) -> Matrix | None:
    """One matrix [sum of N, K] whose rows are those of `parts` in turn.

    None if there is none: the parts are stored differently, or a part other than the last ends
    inside a block, which would need two factors.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return None
    if isinstance(first, BlockMatrix) and any(p.values.shape[0] % BLOCK for p in parts[:-1]):
        return None
    columns = zip(*(part.tensors() for part in parts), strict=True)
    return _of(first, [concat_rows(column) for column in columns])


def concat_rows(parts: tuple[Tensor, ...]) -> Tensor:
    """As `torch.cat`, which imports PyTorch's compiler for tensors without memory."""
    whole = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    at = 0
    for part in parts:
        whole[at : at + len(part)].copy_(part)
        at += len(part)
    return whole


def _of(like: Matrix, tensors: list[Tensor]) -> Matrix:
    if isinstance(like, PlainMatrix):
        return replace(like, values=tensors[0])
    return replace(like, values=tensors[0], scale=tensors[1])
