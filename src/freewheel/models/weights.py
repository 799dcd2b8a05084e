# SPDX-License-Identifier: Apache-2.0
"""Weights from a checkpoint (protocol: nn.source)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor
from freewheel.models.reading import Begun, MappedReader, Reader
from freewheel.models.reading import Mapping as FileMapping
from freewheel.models.staging import gpu_reader
from freewheel.models.storage import (
    PlainStorage,
    Request,
    check_cut,
    empty_matrix,
    find_storage,
)
from freewheel.nn.cut import Cut
from freewheel.nn.matrix import Matrix
from freewheel.spec.mesh import ALONE, Mesh

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""

AHEAD_BYTES = 512 << 20
"""Begun at most before they are asked for, so that files are read while a model is put together:
what a layer holds beside its experts, and some of the next layer's."""


@dataclass(frozen=True)
class _Begun:
    """A weight on its way to its place."""

    own: Matrix
    parts: list[Begun]


class SafetensorsSource:
    """Reads each tensor once from its file into its own storage, cast on the way.

    `requests`: what will be asked for, in order, as far as that is known; it is begun early.

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
        requests: Iterable[Request] = (),
    ) -> None:
        self._stored = stored
        self._upcoming = {request.found.name: request for request in requests}
        self._early: dict[Request, _Begun] = {}
        self._early_bytes = 0
        self._filling: list[Begun] = []
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
        request = Request(PlainStorage(name, tuple(shape)), dtype or self.dtype, cut)
        return self._take(request).tensors()[0]

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        stored = self._check(name, tuple(shape))
        low, high = (int(bound) for bound in self._files.tensor(stored).aminmax())  # of a file
        if low < 0 or high >= below:
            raise CheckpointError(
                f"{name}: holds numbers from {low} to {high}; expected 0 to {below - 1}"
            )
        return self.tensor(name, shape, torch.int32)

    def matrix(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Matrix:
        found = find_storage(self._stored, name, tuple(shape))
        return self._take(Request(found, self.dtype, cut))

    def elsewhere(self, name: str, shape: tuple[int, ...]) -> None:
        del name, shape

    def fill(
        self, name: str, shape: tuple[int, ...], target: Matrix, cut: Cut | None = None
    ) -> None:
        request = Request(find_storage(self._stored, name, tuple(shape)), self.dtype, cut)
        self._filling += self._begin(request, target)
        self._count(sum(request.sizes(self._stored)))

    def settle(self) -> None:
        self._look_ahead()
        for begun in self._filling:
            self._reader.settle(begun)
        self._filling.clear()

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

    def _take(self, request: Request) -> Matrix:
        """What is asked for, when it is there."""
        self._upcoming.pop(request.found.name, None)
        early = self._early.pop(request, None)
        if early is None:
            early = self._start(request)
        else:
            self._early_bytes -= sum(request.sizes(self._stored))
        self._look_ahead()
        for begun in early.parts:
            self._reader.settle(begun)
        self._count(sum(request.sizes(self._stored)))
        return early.own

    def _look_ahead(self) -> None:
        """Begin what is asked for next, in order, as far as it is small enough."""
        for name, request in list(self._upcoming.items()):
            size = sum(request.sizes(self._stored))
            if self._early_bytes + size > AHEAD_BYTES:
                return
            del self._upcoming[name]
            self._early[request] = self._start(request)
            self._early_bytes += size

    def _start(self, request: Request) -> _Begun:
        own = empty_matrix(request.found, request.dtype, self.device, request.cut)
        return _Begun(own, self._begin(request, own))

    def _begin(self, request: Request, target: Matrix) -> list[Begun]:
        """The weight, or its cut, to where it shall lie."""
        if request.cut is not None:
            check_cut(request.found, request.cut)
        wanted, tensors = request.found.wanted(), target.tensors()
        if len(wanted) != len(tensors):
            name = request.found.name
            raise CheckpointError(f"{name}: stored otherwise than what it is joined with")
        return [
            self._reader.begin(self._check(name, part.shape), tensor, request.cut)
            for (name, part), tensor in zip(wanted.items(), tensors, strict=True)
        ]

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
