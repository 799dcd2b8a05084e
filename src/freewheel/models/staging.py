# SPDX-License-Identifier: Apache-2.0
"""From weight files to a GPU, by way of page-locked buffers: threads read while the GPU copies.

A tensor is cut into chunks. Each chunk takes a free buffer and a thread, which reads the file and
starts the copy; the buffer is free again when the GPU has taken what is in it. Whoever asks for
tensors does not wait for the ones before, so that reading never pauses between two of them.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor
from freewheel.models.reading import MOST_MAPPED, TYPES, seen_for

READ_THREADS = 8
"""Sixteen read 16 % faster from the page cache alone (docs/lab.md, 2026-11-30)."""

BUFFERS, BUFFER_BYTES = 2 * READ_THREADS, 8 << 20
"""Buffers at most; half of them are filled while the others are copied."""

_cuda = cast(Any, torch.cuda)


class Slot(Protocol):
    """One buffer on the way."""

    @property
    def buffer(self) -> Tensor:
        """uint8 [n] of host memory."""
        ...

    def wait(self) -> None:
        """Return once the buffer may be overwritten."""
        ...

    def send(self, count: int, target: Tensor) -> None:
        """Start a copy of the first `count` bytes to target, uint8 [count]."""
        ...


@dataclass(frozen=True)
class PinnedSlot:
    """Page-locked memory, from which a GPU copies while the host goes on. For one stream."""

    buffer: Tensor  # uint8 [n]
    stream: Any = field(default_factory=_cuda.current_stream)
    event: Any = field(default_factory=_cuda.Event)

    def wait(self) -> None:
        self.event.synchronize()

    def send(self, count: int, target: Tensor) -> None:
        with _cuda.stream(self.stream), torch.inference_mode():
            target.copy_(self.buffer[:count], non_blocking=True)
            self.event.record()


def pinned_slot(largest: int) -> PinnedSlot:
    """A buffer for the current CUDA stream, no larger than the `largest` tensor, in bytes."""
    return PinnedSlot(_page_locked(max(1, min(largest, BUFFER_BYTES))))


def _page_locked(size: int) -> Tensor:
    """uint8 [size]"""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class StagedReader:
    """To a device, by way of buffers that take turns (protocol: reading.Reader).

    `new_slot` makes one of them; at most `most` are made, as they are needed. Bytes cross as they
    are stored and are converted on the device.
    """

    def __init__(
        self, new_slot: Callable[[], Slot], most: int = BUFFERS, threads: int = READ_THREADS
    ) -> None:
        self._new_slot, self._most = new_slot, most
        self._slots: list[Slot] = []
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._threads = ThreadPoolExecutor(threads)
        self._begun: list[Future[None]] = []

    def __len__(self) -> int:
        """Files that are open now."""
        return len(self._files)

    def begin(self, stored: StoredTensor, target: Tensor) -> None:
        bits = target.dtype in (TYPES[stored.dtype], torch.uint8)
        if bits and target.is_contiguous() and target.nbytes == stored.size:
            self._begin(stored, target.view(-1).view(torch.uint8))
            return
        raw = torch.empty(stored.size, dtype=torch.uint8, device=target.device)
        self._begin(stored, raw)
        self.settle()
        target.copy_(seen_for(raw, stored, target.dtype))

    def settle(self) -> None:
        begun, self._begun = self._begun, []
        for job in begun:
            job.result()

    def close(self) -> None:
        wait(self._begun)
        for slot in self._slots:
            slot.wait()
        self._threads.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _begin(self, stored: StoredTensor, raw: Tensor) -> None:
        """The tensor's bytes to raw, uint8 [size]."""
        descriptor, done = self._descriptor(stored.file), 0
        while done < stored.size:
            slot = self._take()
            part = raw[done : done + slot.buffer.numel()]
            job = (slot, descriptor, stored.file, stored.start + done, part)
            self._begun.append(self._threads.submit(self._carry, *job))
            done += part.numel()

    def _carry(self, slot: Slot, descriptor: int, file: Path, offset: int, part: Tensor) -> None:
        """Bytes of the file from `offset` on, to part, uint8 [n]."""
        try:
            slot.wait()
            count = part.numel()
            view = memoryview((ctypes.c_char * count).from_address(slot.buffer.data_ptr()))
            if not _read_all(descriptor, view, offset):
                raise CheckpointError(f"{file}: truncated while it was being read")
            slot.send(count, part)
        finally:
            self._free.put(slot)

    def _take(self) -> Slot:
        """A buffer that no thread fills."""
        try:
            return self._free.get_nowait()
        except Empty:
            if len(self._slots) == self._most:
                return self._free.get()
            self._slots.append(self._new_slot())
            return self._slots[-1]

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
            if len(self._files) > MOST_MAPPED:
                self.settle()  # a thread may read from the file that is closed now
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(file)
        return self._files[file]


def _read_all(descriptor: int, view: memoryview, offset: int) -> bool:
    """Fill `view` from `offset` of the file on; False if the file ends before."""
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            return False
        view, offset = view[count:], offset + count
    return True
