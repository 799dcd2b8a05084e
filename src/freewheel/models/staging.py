# SPDX-License-Identifier: Apache-2.0
"""From weight files to a GPU, by way of page-locked buffers: threads read while the GPU copies.

A tensor is cut into pieces: stretches of a file, or, of a rank's columns, some bytes of each of
many rows. Whichever reading thread is free takes the next piece and a free buffer and reads; one
more thread starts the copies, and a buffer is free again when the GPU has taken what is in it.
Whoever asks for tensors does not wait for the ones before, so that reading never pauses between
two of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast

import numpy
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor
from freewheel.models.reading import TYPES, Begun, runs_of, seen_for
from freewheel.nn.cut import Cut

READ_THREADS = 8
"""More read faster alone, and slower while one thread more sends: each turn of Python's lock costs
more, the more threads wait for it (docs/lab.md, 2026-11-30)."""

BUFFERS, BUFFER_BYTES = 2 * READ_THREADS, 8 << 20
"""Buffers at most; half of them are filled while the others are copied. Small ones stay in the
processor's cache from the read to the copy, and take a turn of Python's lock more often."""

MOST_OPEN = 16
"""Files that are open at once."""

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


class Stretch(NamedTuple):
    """Bytes of an open file from `offset` on."""

    descriptor: int
    file: Path
    offset: int

    def read(self, buffer: Tensor) -> None:
        """Fill the buffer, uint8 [n]."""
        view, at = _memory_of(buffer), self.offset
        while view:
            count = os.preadv(self.descriptor, [view], at)
            if count == 0:
                raise CheckpointError(f"{self.file}: truncated while it was being read")
            view, at = view[count:], at + count


class Rows(NamedTuple):
    """`run` bytes of each of `count` rows of an open file: of the first, those from `offset` on."""

    descriptor: int
    file: Path
    offset: int
    count: int
    row_bytes: int
    run: int

    def read(self, buffer: Tensor) -> None:
        """Fill the buffer, uint8 [count * run].

        Through a mapping of its own, which counts as the process's memory only while it lives.
        numpy copies, for PyTorch would start threads of its own in each thread.
        """
        inner = self.offset % mmap.ALLOCATIONGRANULARITY
        length = (self.count - 1) * self.row_bytes + self.run
        try:
            mapped = mmap.mmap(
                self.descriptor, inner + length, access=mmap.ACCESS_READ, offset=self.offset - inner
            )
        except ValueError as error:
            raise CheckpointError(f"{self.file}: truncated while it was being read") from error
        with mapped:
            every = numpy.frombuffer(mapped, numpy.uint8, length, inner)
            shape, strides = (self.count, self.run), (self.row_bytes, 1)
            rows = as_strided(every, shape, strides, writeable=False)
            numpy.copyto(numpy.frombuffer(_memory_of(buffer), numpy.uint8).reshape(shape), rows)
            del every, rows


def _memory_of(buffer: Tensor) -> memoryview:
    """Of a buffer on the host, uint8 [n]."""
    return memoryview((ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr()))


class Piece(NamedTuple):
    """What fits a buffer, and where it goes."""

    source: Stretch | Rows
    target: Tensor  # uint8 [n]
    begun: Begun


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

    def begin(self, stored: StoredTensor, target: Tensor, cut: Cut | None = None) -> Begun:
        if target.dtype in (TYPES[stored.dtype], torch.uint8) and target.is_contiguous():
            return self._begin(stored, target.view(-1).view(torch.uint8), cut)
        as_stored = stored if cut is None else replace(stored, shape=cut.shape(stored.shape))
        share = 1 if cut is None else cut.share.count
        raw = torch.empty(stored.size // share, dtype=torch.uint8, device=target.device)
        begun = self._begin(stored, raw, cut)
        begun.finish = lambda: cast(None, target.copy_(seen_for(raw, as_stored, target.dtype)))
        return begun

    def settle(self, begun: Begun) -> None:
        self._await(lambda: begun.left == 0)
        begun.finish()

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

    def _await(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: done() or self._ended())
        for job in self._ended():
            job.result()

    def _begin(self, stored: StoredTensor, raw: Tensor, cut: Cut | None) -> Begun:
        """The tensor's bytes, or those of the cut, to raw, uint8 [n]."""
        if raw.numel() == 0:
            return Begun()
        self._grow()
        most = self._slots[0].buffer.numel()
        sources = list(self._sources(stored, cut, most))
        targets = raw.split([size for _, size in sources])
        begun = Begun(len(sources))
        for (source, _), target in zip(sources, targets, strict=True):
            self._grow()
            self._begun += 1
            self._wanted.put(Piece(source, target, begun))
        return begun

    def _sources(
        self, stored: StoredTensor, cut: Cut | None, most: int
    ) -> Iterator[tuple[Stretch | Rows, int]]:
        """What fits a buffer of `most` bytes, and how many bytes that is, one behind the other."""
        file, descriptor = stored.file, self._descriptor(stored.file)
        rows, run, share = runs_of(stored, cut)
        start = stored.start + share.index * run
        if rows == 1 or run > most:
            for row in range(rows):
                for at in range(0, run, most):
                    offset = start + row * share.count * run + at
                    yield Stretch(descriptor, file, offset), min(most, run - at)
            return
        for row in range(0, rows, most // run):
            count, offset = min(most // run, rows - row), start + row * share.count * run
            yield Rows(descriptor, file, offset, count, share.count * run, run), count * run

    def _grow(self) -> None:
        """Make a buffer more if all may be taken."""
        if self._begun - self._sent >= len(self._slots) < self._most:
            self._slots.append(self._new_slot())
            self._free.put(self._slots[-1])

    def _read_pieces(self) -> None:
        while (piece := self._wanted.get()) and (slot := self._free.get()):
            if self._closing:
                return
            piece.source.read(slot.buffer[: piece.target.numel()])
            self._filled.put((slot, piece))

    def _send_pieces(self, sending: Callable[[], AbstractContextManager[object]]) -> None:
        sent: deque[Slot] = deque()
        with sending():
            while filled := self._filled.get():
                slot, piece = filled
                slot.send(piece.target.numel(), piece.target)
                sent.append(slot)
                self._note_sent(piece)
                while sent and (len(sent) > self._most // 2 or self._filled.empty()):
                    sent[0].wait()
                    self._free.put(sent.popleft())

    def _note_sent(self, piece: Piece) -> None:
        self._sent += 1  # by this thread alone, as `_begun` by the caller's
        piece.begun.left -= 1
        if piece.begun.left == 0:
            with self._changed:
                self._changed.notify_all()

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
            if len(self._files) > MOST_OPEN:
                self._await(lambda: self._sent == self._begun)  # one may be read from now
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(file)
        return self._files[file]


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
