# SPDX-License-Identifier: Apache-2.0
"""Streams and marks: in which order a round's work is done, written down once.

Two streams. Rounds run on one, letters home travel on the other. A mark is an event: set at a point
of one stream, followed by another stream, or awaited by the host.

    host      packs letter n into a staging buffer that letter n - depth - 1 has left
    rounds    copies it to the inbox of its shape; sets `taken` on the staging buffer
    rounds    follows `arrived` of the last letter home of this shape: its outbox may be overwritten
    rounds    replays the graph of round n; sets `written`
    copies    follows `written`; copies the outbox to a slot on the host; sets `arrived`
    host      awaits `arrived`, later; reads the slot, and only then may use it again

Rounds follow one another on one stream, so a graph never sees the inbox of the next round, and all
graphs may share the memory of their temporaries. A letter that was read says that its round, and
every round before it, has finished: what the host frees then, no round in flight can reach.
`tests/program/test_interleavings.py` runs this code under every order that the marks allow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor

_cuda = cast(Any, torch.cuda)  # half of its members lack types


class Mark(Protocol):
    """A point in a stream. One that was never set counts as passed."""

    def set(self) -> None:
        """Here, in the current stream."""
        ...

    def follow(self) -> None:
        """Whatever the current stream does next comes after the mark."""
        ...

    def wait(self) -> None:
        """The host waits until the device passed the mark."""
        ...


class Streams(Protocol):
    """Where work is queued, and the host memory that copies may run ahead on."""

    def rounds(self) -> AbstractContextManager[object]:
        """Work inside is queued behind the rounds."""
        ...

    def copies(self) -> AbstractContextManager[object]:
        """Work inside is queued behind the letters home."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy in the current stream. One of the two is host memory from `pages`."""
        ...

    def mark(self) -> Mark: ...

    def pages(self, *shape: int) -> Tensor:
        """int32 zeros [*shape] in host memory that the device can reach by itself."""
        ...

    def beside(self, seconds: float) -> float:
        """Of so many seconds of the host's work, those in which queued work goes on."""
        ...


class _PassedMark:
    def set(self) -> None: ...

    def follow(self) -> None: ...

    def wait(self) -> None: ...


class NoStreams:
    """The CPU: work is done when its call returns."""

    def rounds(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copies(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return _PassedMark()

    def pages(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def beside(self, seconds: float) -> float:
        del seconds
        return 0.0


class _CudaMark:
    def __init__(self) -> None:
        self._event = _cuda.Event()

    def set(self) -> None:
        self._event.record()

    def follow(self) -> None:
        self._event.wait()

    def wait(self) -> None:
        self._event.synchronize()


class CudaStreams:
    """The current CUDA device. Make it after the static tensors: the streams begin behind them."""

    def __init__(self) -> None:
        self._rounds, self._copies = _cuda.Stream(), _cuda.Stream()

    def start(self) -> None:
        """Both streams wait for what the current stream has queued so far."""
        for stream in (self._rounds, self._copies):
            stream.wait_stream(_cuda.current_stream())

    def rounds(self) -> AbstractContextManager[object]:
        return _cuda.stream(self._rounds)

    def copies(self) -> AbstractContextManager[object]:
        return _cuda.stream(self._copies)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark()

    def pages(self, *shape: int) -> Tensor:
        pages = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        assert pages.is_pinned(), "a copy from pageable memory makes the host wait"
        return pages

    def beside(self, seconds: float) -> float:
        return seconds


def open_streams(device: str) -> Streams:
    """Streams that begin behind the static tensors made so far."""
    if device != "cuda":
        return NoStreams()
    streams = CudaStreams()
    streams.start()
    return streams


def await_device(device: str) -> None:
    """Until all that is queued on "cpu" or "cuda", in whatever stream, is done."""
    if device == "cuda":
        _cuda.synchronize()


def empty_caches(device: str) -> None:
    """Give memory that nobody uses back to the system: the device's, and the host's that is pinned,
    both of which PyTorch would keep for later."""
    if device == "cuda":
        _cuda.empty_cache()
        cast(Any, torch._C)._host_emptyCache()
