# SPDX-License-Identifier: Apache-2.0
"""From a weight file to where a tensor lies: each byte is read once, and converted on the way."""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor

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

BUFFER_BYTES = 64 << 20
"""Of each of the two buffers between a file and a GPU."""

READ_THREADS = 4


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


class Reader(Protocol):
    """Copies a stored tensor to where it shall lie, cast to the dtype there."""

    def read(self, stored: StoredTensor, target: Tensor) -> None: ...

    def close(self) -> None: ...


class MappedReader:
    """To host memory, or to anything that a view of a file can be copied to."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

    def read(self, stored: StoredTensor, target: Tensor) -> None:
        target.copy_(seen_for(self._mapping.bytes_of(stored), stored, target.dtype))

    def close(self) -> None:
        """The mapping is its owner's."""


class Slot(Protocol):
    """One buffer on the way, and how to know that the device has taken what is in it."""

    @property
    def buffer(self) -> Tensor:
        """uint8 [n] of host memory."""
        ...

    def wait(self) -> None:
        """Return once the buffer may be overwritten."""
        ...

    def sent(self) -> None:
        """A copy out of the buffer has been started."""
        ...


@dataclass(frozen=True)
class PinnedSlot:
    """Page-locked memory, from which a GPU copies while the next bytes are read."""

    buffer: Tensor  # uint8 [n]
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()

    def sent(self) -> None:
        self.event.record()


def pinned_slots() -> tuple[Slot, ...]:
    """Two, for the current CUDA device."""
    return tuple(
        PinnedSlot(
            torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
        )
        for _ in range(2)
    )


class StagedReader:
    """To a device, by way of buffers that take turns: one is filled while others are copied.

    Bytes cross as they are stored and are converted on the device.
    """

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self._slots = slots
        self._turn = 0
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._threads = ThreadPoolExecutor(READ_THREADS)

    def __len__(self) -> int:
        """Files that are open now."""
        return len(self._files)

    def read(self, stored: StoredTensor, target: Tensor) -> None:
        bits = target.dtype in (TYPES[stored.dtype], torch.uint8)
        if bits and target.is_contiguous() and target.nbytes == stored.size:
            self._copy(stored, target.view(-1).view(torch.uint8))
            return
        raw = torch.empty(stored.size, dtype=torch.uint8, device=target.device)
        self._copy(stored, raw)
        target.copy_(seen_for(raw, stored, target.dtype))

    def close(self) -> None:
        for slot in self._slots:
            slot.wait()
        self._threads.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _copy(self, stored: StoredTensor, raw: Tensor) -> None:
        """The tensor's bytes to raw, uint8 [size]."""
        descriptor = self._descriptor(stored.file)
        done = 0
        while done < stored.size:
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % len(self._slots)
            count = min(stored.size - done, slot.buffer.numel())
            slot.wait()
            self._fill(descriptor, stored, done, slot.buffer[:count])
            raw[done : done + count].copy_(slot.buffer[:count], non_blocking=True)
            slot.sent()
            done += count

    def _fill(self, descriptor: int, stored: StoredTensor, skip: int, buffer: Tensor) -> None:
        """Read the tensor's bytes from `skip` on into buffer, by several threads."""
        view = memoryview((ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr()))
        jobs = [
            self._threads.submit(_read_all, descriptor, view[a:b], stored.start + skip + a)
            for a, b in _pieces(buffer.numel(), READ_THREADS)
        ]
        if not all(done for done in [job.result() for job in jobs]):
            raise CheckpointError(f"{stored.file}: truncated while it was being read")

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
            if len(self._files) > MOST_MAPPED:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(file)
        return self._files[file]


def _pieces(size: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` neighbouring ranges of about equal length that cover `size`."""
    ends = [size * at // count for at in range(count + 1)]
    yield from pairwise(ends)


def _read_all(descriptor: int, view: memoryview, offset: int) -> bool:
    """Fill `view` from `offset` of the file on; False if the file ends before."""
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            return False
        view, offset = view[count:], offset + count
    return True
