# SPDX-License-Identifier: Apache-2.0
"""Weights from a checkpoint (protocol: nn.source)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor
from freewheel.models.reading import MappedReader, Reader, part_of
from freewheel.models.reading import Mapping as FileMapping
from freewheel.models.staging import gpu_reader
from freewheel.models.storage import (
    BlockStorage,
    PackedStorage,
    PlainStorage,
    check_cut,
    find_storage,
)
from freewheel.nn.cut import Cut
from freewheel.nn.matrix import BlockMatrix, Matrix, PackedMatrix, PlainMatrix
from freewheel.spec.mesh import ALONE, Mesh

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


class SafetensorsSource:
    """Reads each tensor once from its file into its own storage, cast on the way.

    Use it in a `with` block: it holds the files open. It checks shapes against the headers; dtypes
    are `accounting`'s to check, before anything is read.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        progress: Progress | None = None,
        total_bytes: int = 0,
        mesh: Mesh = ALONE,
    ) -> None:
        self._stored = stored
        self.mesh = mesh
        self.dtype = dtype
        self.device = torch.device(device)
        self.skipped: dict[str, str] = {}
        self._progress = progress
        self._total = total_bytes
        self._done = 0
        self._files = FileMapping()
        self._reader = self._make_reader()

    def _make_reader(self) -> Reader:
        if self.device.type == "cuda":
            largest = max((stored.size for stored in self._stored.values()), default=1)
            return gpu_reader(largest)
        return MappedReader(self._files)

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._reader.settle()
        finally:
            self._reader.close()
            self._files.close()

    def has(self, name: str) -> bool:
        return name in self._stored

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        if cut is not None:
            cut.check(name, shape)
        own = self._empty(shape, dtype or self.dtype, cut)
        self._begin(name, tuple(shape), own, cut)
        self.settle()
        return own

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        stored = self._check(name, tuple(shape))
        low, high = (int(bound) for bound in self._files.tensor(stored).aminmax())  # of a file
        if low < 0 or high >= below:
            raise CheckpointError(
                f"{name}: holds numbers from {low} to {high}; expected 0 to {below - 1}"
            )
        return self.tensor(name, shape, torch.int32)

    def matrix(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Matrix:
        match find_storage(self._stored, name, tuple(shape)):
            case PlainStorage():
                own = PlainMatrix(self._empty(shape, self.dtype, cut))
            case BlockStorage() as found:
                scale = self._empty(found.grid, torch.float32, cut)
                values = self._empty(shape, torch.float8_e4m3fn, cut)
                own = BlockMatrix(values, scale)
            case PackedStorage() as found:
                scale = self._empty(found.grid, torch.uint8, cut)
                own = PackedMatrix(self._empty(found.bytes_shape, torch.uint8, cut), scale)
        self.fill(name, shape, own, cut)
        self.settle()
        return own

    def elsewhere(self, name: str, shape: tuple[int, ...]) -> None:
        del name, shape

    def fill(
        self, name: str, shape: tuple[int, ...], target: Matrix, cut: Cut | None = None
    ) -> None:
        found = find_storage(self._stored, name, tuple(shape))
        if cut is not None:
            check_cut(found, cut)
        wanted = found.wanted()
        tensors = target.tensors()
        if len(wanted) != len(tensors):
            raise CheckpointError(f"{name}: stored otherwise than what it is joined with")
        for (own, part), tensor in zip(wanted.items(), tensors, strict=True):
            self._begin(own, part.shape, tensor, cut)

    def settle(self) -> None:
        self._reader.settle()

    def dense(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        if isinstance(find_storage(self._stored, name, tuple(shape)), PlainStorage):
            return self.tensor(name, shape, dtype, cut)
        return self.matrix(name, shape, cut).dense(dtype or self.dtype)

    def same(self, name: str, other: str) -> bool:
        if not (self.has(name) and self.has(other)):
            return False
        one, two = self._stored[name], self._stored[other]
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            return False
        raw, others = self._files.bytes_of(one), self._files.bytes_of(two)
        pieces = zip(raw.split(1 << 22), others.split(1 << 22), strict=True)
        if not all(bool((a == b).all()) for a, b in pieces):  # of files: no device is read
            return False
        self._count(one.size)
        return True

    def skip(self, pattern: str, reason: str) -> None:
        self.skipped[pattern] = reason

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None = None) -> Tensor:
        own = shape if cut is None else cut.shape(shape)
        return torch.empty(own, dtype=dtype, device=self.device)

    def _begin(
        self, name: str, shape: tuple[int, ...], target: Tensor, cut: Cut | None = None
    ) -> None:
        """Tensor `name`, which is of `shape` in its file, or its cut, to where it shall lie."""
        stored = self._check(name, shape)
        if cut is None:
            self._reader.begin(stored, target)
            self._count(stored.size)
            return
        if (part := part_of(stored, cut)) is not None:
            self._reader.begin(part, target)
        else:  # a stretch of every row: seen in the mapped file, so that no other page is read
            target.copy_(cut.of(self._files.tensor_for(stored, target.dtype)))
        self._count(stored.size // cut.share.count)

    def _check(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name not in self._stored:
            raise CheckpointError(f"{name}: the checkpoint holds no such tensor")
        stored = self._stored[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"{name}: expected shape {list(shape)}, found {list(stored.shape)}"
            )
        return stored

    def _count(self, size: int) -> None:
        """So many bytes more are read, or begun to be read."""
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)
