# SPDX-License-Identifier: Apache-2.0
"""From a weight file to where a tensor lies: each byte is read once, and converted on the way."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from freewheel.models.header import StoredTensor
from freewheel.nn.cut import Cut
from freewheel.spec.mesh import Share

TYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.uint8,
    "I8": torch.uint8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""How the bytes of each dtype are seen: packed numbers as bytes."""

MOST_MAPPED = 4
"""Files that are mapped at once: what a mapping has touched counts as this process's memory."""


class Mapping:
    """Sees files as tensors of bytes, without reading them before they are looked at."""

    def __init__(self) -> None:
        self._mapped: OrderedDict[Path, Tensor] = OrderedDict()

    def __len__(self) -> int:
        """Files that are mapped now."""
        return len(self._mapped)

    def bytes_of(self, stored: StoredTensor) -> Tensor:
        """uint8 [size], a view of the file."""
        file = stored.file
        if file not in self._mapped:
            size = file.stat().st_size
            self._mapped[file] = torch.from_file(str(file), False, size, dtype=torch.uint8)
        self._mapped.move_to_end(file)
        while len(self._mapped) > MOST_MAPPED:
            self._mapped.popitem(last=False)
        return self._mapped[file][stored.start : stored.start + stored.size]

    def tensor(self, stored: StoredTensor) -> Tensor:
        """The tensor as a view of the file; of packed numbers, their bytes."""
        return seen_as(self.bytes_of(stored), stored)

    def tensor_for(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """As `tensor`, seen so that copying it to a tensor of `dtype` gives what is meant."""
        return seen_for(self.bytes_of(stored), stored, dtype)

    def close(self) -> None:
        self._mapped.clear()


def seen_as(raw: Tensor, stored: StoredTensor) -> Tensor:
    """uint8 [size] as the tensor that it is; a view where its place allows one."""
    dtype = TYPES[stored.dtype]
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()  # an odd place in the file
    shape = stored.shape
    if stored.dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    return raw.view(dtype).view(shape)


def seen_for(raw: Tensor, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    """As `seen_as`, so that copying to a tensor of `dtype` gives what is meant.

    A byte that scales is a power of two wherever a number is asked for, and itself where a byte is.
    """
    found = seen_as(raw, stored)
    if found.dtype == torch.float8_e8m0fnu and dtype == torch.uint8:
        return found.view(torch.uint8)
    if found.dtype == torch.uint8 and dtype.is_floating_point:
        return found.view(torch.float8_e8m0fnu)
    return found


def runs_of(stored: StoredTensor, cut: Cut | None) -> tuple[int, int, Share]:
    """How a rank's part lies in the file: of so many rows, so many bytes each, at which share of
    the row."""
    if cut is None:
        return 1, stored.size, Share()
    before = stored.shape[: len(stored.shape) + cut.dim]
    rows = math.prod(before) * cut.stretches
    return rows, stored.size // (rows * cut.share.count), cut.share


class Begun:
    """What was begun of one tensor. `left`: pieces on their way. `finish`: what then remains."""

    __slots__ = ("finish", "left")

    def __init__(self, left: int = 0, finish: Callable[[], None] = lambda: None) -> None:
        self.left, self.finish = left, finish


class Reader(Protocol):
    """Copies stored tensors, or a rank's part of them, to where they shall lie, cast to the dtype
    there."""

    def begin(self, stored: StoredTensor, target: Tensor, cut: Cut | None = None) -> Begun:
        """The target may not be looked at before `settle`."""
        ...

    def settle(self, begun: Begun) -> None:
        """Return when all of it is where it belongs, for who comes behind on its stream. Once.

        Raises CheckpointError if a file ended too soon.
        """
        ...

    def close(self) -> None:
        """Give up what was begun, and all memory."""
        ...


class MappedReader:
    """To host memory, or to anything that a view of a file can be copied to."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

    def begin(self, stored: StoredTensor, target: Tensor, cut: Cut | None = None) -> Begun:
        """What is begun is done."""
        found = seen_for(self._mapping.bytes_of(stored), stored, target.dtype)
        target.copy_(found if cut is None else cut.of(found))
        return Begun()

    def settle(self, begun: Begun) -> None:
        begun.finish()

    def close(self) -> None:
        """The mapping is its owner's."""
