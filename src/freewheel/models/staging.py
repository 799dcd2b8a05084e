# SPDX-License-Identifier: Apache-2.0
"""From weight files to a GPU, by way of page-locked buffers: threads read while the GPU copies.

A tensor is cut into pieces. Whichever reading thread is free takes the next piece and a free
buffer and reads; one more thread starts the copies, and a buffer is free again when the GPU has
taken what is in it. Whoever asks for tensors does not wait for the ones before, so that reading
never pauses between two of them.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor
from freewheel.models.reading import MOST_MAPPED, TYPES, seen_for

READ_THREADS = 12
"""More read faster alone, and slower while one thread more sends (docs/lab.md, 2026-11-30)."""

BUFFERS, BUFFER_BYTES = 2 * READ_THREADS, 4 << 20
"""Buffers at most; half of them are filled while the others are copied. Small ones stay in the
processor's cache from the read to the copy."""

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
    """Page-locked memory, from which a GPU copies while the host goes on."""

    buffer: Tensor  # uint8 [n]
    event: Any

    def wait(self) -> None:
        self.event.synchronize()

    def send(self, count: int, target: Tensor) -> None:
        target.copy_(self.buffer[:count], non_blocking=True)
        self.event.record()


class Piece(NamedTuple):
    """Bytes of an open file from `offset` on, and where they go."""

    descriptor: int
    file: Path
    offset: int
    target: Tensor  # uint8 [n]


class _Outcome(Future[None]):
    """Of what is done inside it, whatever that raises."""

    def __enter__(self) -> None:
        self.set_running_or_notify_cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)
        return True


def _begin_thread(run: Callable[[], None]) -> Future[None]:
    """Run it in a thread that no process waits for when it ends."""
    outcome = _Outcome()

    def recorded() -> None:
        with outcome:
            run()

    Thread(target=recorded, name="weights", daemon=True).start()
    return outcome


class StagedReader:
    """To a device, by way of buffers that take turns (protocol: reading.Reader).

    `new_slot` makes one of them; at most `most` are made, as they are needed. The thread that sends
    does all of it inside `sending()`. Bytes cross as they are stored and are converted on the
    device.
    """

    def __init__(
        self,
        new_slot: Callable[[], Slot],
        most: int = BUFFERS,
        threads: int = READ_THREADS,
        sending: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._new_slot, self._most, self._count = new_slot, most, threads
        self._slots: list[Slot] = []
        self._free: SimpleQueue[Slot | None] = SimpleQueue()
        self._wanted: SimpleQueue[Piece | None] = SimpleQueue()
        self._filled: SimpleQueue[tuple[Slot, Piece] | None] = SimpleQueue()
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._begun = self._sent = 0
        self._closing = False
        self._changed = Condition()
        self._jobs = [_begin_thread(self._read_pieces) for _ in range(threads)]
        self._jobs.append(_begin_thread(lambda: self._send_pieces(sending)))
        for job in self._jobs:
            job.add_done_callback(self._tell)

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
        with self._changed:
            self._changed.wait_for(lambda: self._sent == self._begun or self._ended())
        for job in self._ended():
            job.result()

    def close(self) -> None:
        self._closing = True
        for _ in range(self._count):
            self._wanted.put(None)
            self._free.put(None)
        for job in self._jobs[:-1]:
            job.exception()
        self._filled.put(None)
        self._jobs[-1].exception()
        for slot in self._slots:
            slot.wait()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _ended(self) -> list[Future[None]]:
        """Threads that stopped, which none does before `close` but by an error."""
        return [job for job in self._jobs if job.done()]

    def _tell(self, _: Future[None]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _begin(self, stored: StoredTensor, raw: Tensor) -> None:
        """The tensor's bytes to raw, uint8 [size]."""
        descriptor, done = self._descriptor(stored.file), 0
        while done < stored.size:
            target = raw[done : done + self._piece_bytes()]
            self._begun += 1
            self._wanted.put(Piece(descriptor, stored.file, stored.start + done, target))
            done += target.numel()

    def _piece_bytes(self) -> int:
        """What a buffer holds. Makes one if all may be taken."""
        if self._begun - self._sent >= len(self._slots) < self._most:
            self._slots.append(self._new_slot())
            self._free.put(self._slots[-1])
        return self._slots[0].buffer.numel()

    def _read_pieces(self) -> None:
        while (piece := self._wanted.get()) and (slot := self._free.get()):
            if self._closing:
                return
            slot.wait()
            count = piece.target.numel()
            view = memoryview((ctypes.c_char * count).from_address(slot.buffer.data_ptr()))
            if not _read_all(piece.descriptor, view, piece.offset):
                raise CheckpointError(f"{piece.file}: truncated while it was being read")
            self._filled.put((slot, piece))

    def _send_pieces(self, sending: Callable[[], AbstractContextManager[object]]) -> None:
        with sending():
            while filled := self._filled.get():
                slot, piece = filled
                slot.send(piece.target.numel(), piece.target)
                self._free.put(slot)
                self._sent += 1  # by this thread alone, as `_begun` by the caller's
                if self._sent == self._begun:
                    with self._changed:
                        self._changed.notify_all()

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


def gpu_reader(
    largest: int, buffer_bytes: int = BUFFER_BYTES, threads: int = READ_THREADS
) -> StagedReader:
    """For targets on the current CUDA device, of `largest` bytes at most, on its current stream."""
    stream = _cuda.current_stream()
    size = max(1, min(largest, buffer_bytes))

    def new_slot() -> PinnedSlot:
        return PinnedSlot(torch.empty(size, dtype=torch.uint8, pin_memory=True), _cuda.Event())

    @contextmanager
    def sending() -> Iterator[None]:
        with _cuda.stream(stream), torch.inference_mode():
            yield

    return StagedReader(new_slot, 2 * threads, threads, sending)
