# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint stores one weight, as its files' headers tell, and which tensors that takes.

The dtype in the header decides, whatever config.json says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor
from freewheel.nn.cut import INPUTS, Cut
from freewheel.nn.matrix import BLOCK, GROUP, BlockMatrix, Matrix, PackedMatrix, PlainMatrix

FLOATS = ("BF16", "F16", "F32", "F64")
WHOLE = ("I32", "I64")
FP8 = ("F8_E4M3",)
PACKED = ("I8", "U8", "F4")
POWERS = ("F8_E8M0", "U8")
SCALES = (*FLOATS, "F8_E8M0", "U8")
"""Dtypes that can be read, by safetensors' names: of weights, tables of ids, FP8 weights, two e2m1
a byte, powers of two (a byte each), and factors of blocks. A byte is never a factor itself."""

SCALE_ENDINGS = ("_scale_inv", "_scale")
"""Behind a weight's name; all of them multiply, whatever they are called (DeepSeek-V3's readme)."""


@dataclass(frozen=True)
class Wanted:
    """One tensor that a file must hold: its shape there, and the dtypes that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True)
class PlainStorage:
    """A tensor of floating-point numbers."""

    name: str
    shape: tuple[int, ...]

    def wanted(self) -> dict[str, Wanted]:
        return {self.name: Wanted(self.shape)}


@dataclass(frozen=True)
class BlockStorage:
    """FP8 numbers, and a factor for each block of them."""

    name: str
    shape: tuple[int, ...]
    scale: str

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the factors."""
        rows, columns = -(-self.shape[-2] // BLOCK), -(-self.shape[-1] // BLOCK)
        return (*self.shape[:-2], rows, columns)

    def wanted(self) -> dict[str, Wanted]:
        return {self.name: Wanted(self.shape, FP8), self.scale: Wanted(self.grid, SCALES)}


@dataclass(frozen=True)
class PackedStorage:
    """MXFP4: two e2m1 numbers a byte, and a power of two for each group of inputs.

    `packed`: the header's shape counts bytes, as for I8 and U8; with F4 it counts numbers.
    """

    name: str
    shape: tuple[int, ...]
    scale: str
    packed: bool

    @property
    def bytes_shape(self) -> tuple[int, ...]:
        """Shape of the numbers, two of them a byte."""
        return (*self.shape[:-1], self.shape[-1] // 2)

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the powers."""
        return (*self.shape[:-1], self.shape[-1] // GROUP)

    def wanted(self) -> dict[str, Wanted]:
        own = self.bytes_shape if self.packed else self.shape
        return {self.name: Wanted(own, PACKED), self.scale: Wanted(self.grid, POWERS)}


Storage = PlainStorage | BlockStorage | PackedStorage


@dataclass(frozen=True)
class Request:
    """For a weight, or a rank's `cut` of it. `dtype`: as in `empty_matrix`."""

    found: Storage
    dtype: torch.dtype
    cut: Cut | None = None

    def sizes(self, stored: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        """Stored bytes that are read, of each tensor that it takes."""
        share = 1 if self.cut is None else self.cut.share.count
        return tuple(stored[name].size // share for name in self.found.wanted())


def find_storage(stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...]) -> Storage:
    """How weight `name` [..., N, K] is stored. One that is missing counts as plain, or as FP8 if
    there is something to scale it.

    Raises CheckpointError for packed numbers of which a scale's group would be cut.
    """
    found, scale = stored.get(name), _scale_name(stored, name)
    if found is None:
        return BlockStorage(name, shape, scale) if scale in stored else PlainStorage(name, shape)
    if found.dtype in FP8:
        return BlockStorage(name, shape, scale)
    if found.dtype not in PACKED:
        return PlainStorage(name, shape)
    if shape[-1] % GROUP:
        raise CheckpointError(
            f"{name} (in {found.file.name}): {found.dtype} with {shape[-1]} inputs, which are no "
            f"groups of {GROUP}"
        )
    return PackedStorage(name, shape, scale, packed=found.dtype != "F4")


def empty_matrix(
    found: Storage, dtype: torch.dtype, device: torch.device, cut: Cut | None
) -> Matrix:
    """A place for the weight, or for a rank's part of it, in the precision in which it is stored.

    `dtype`: of plain numbers, whatever floating-point dtype they are stored in.
    """

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        own = shape if cut is None else cut.shape(shape)
        return torch.empty(own, dtype=dtype, device=device)

    match found:
        case PlainStorage():
            return PlainMatrix(empty(found.shape, dtype))
        case BlockStorage():
            scale = empty(found.grid, torch.float32)
            return BlockMatrix(empty(found.shape, torch.float8_e4m3fn), scale)
        case PackedStorage():
            scale = empty(found.grid, torch.uint8)
            return PackedMatrix(empty(found.bytes_shape, torch.uint8), scale)


def check_cut(found: Storage, cut: Cut) -> None:
    """Raise ConfigError, naming the weight, if a rank's part would cut what one scale covers."""
    match found:
        case BlockStorage() if cut.dim >= -2:
            cut.check(found.name, found.shape, BLOCK)
        case PackedStorage() if cut.dim == INPUTS:
            cut.check(found.name, found.shape, GROUP)
        case _:
            cut.check(found.name, found.shape)


def scale_names(name: str) -> tuple[str, ...]:
    """What the tensor that scales weight `name` may be called, its family's own way first."""
    names = [f"{name}{ending}" for ending in SCALE_ENDINGS]
    if not name.endswith(".weight"):
        return tuple(names)
    short = f"{name.removesuffix('.weight')}.scale"
    return (*names, short) if name.startswith("model.") else (short, *names)


def _scale_name(stored: Mapping[str, StoredTensor], name: str) -> str:
    names = scale_names(name)
    return next((n for n in names if n in stored), names[0])
