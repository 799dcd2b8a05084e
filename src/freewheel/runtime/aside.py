# SPDX-License-Identifier: Apache-2.0
"""A stream beside the rounds, for copies that no round waits for and that wait for no round.

    aside     gathers a block's pages, sums them up, copies them to host memory; sets a mark
    host      sees, rounds later, that the mark has passed; only then may a round write the pages
    aside     copies a block from host memory, compares sums, spreads it over pages; sets a mark
    host      sees that the mark has passed; only then does a letter name the pages

What a copy reads was written by rounds whose letters were read, and what it writes is touched by no
round in flight, so the host's order of calls is all the order that is needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor

_cuda = cast(Any, torch.cuda)  # half of its members lack types


class Milestone(Protocol):
    """A point in the stream. One that was never set counts as passed."""

    def set(self) -> None:
        """Here, in the current stream."""
        ...

    def passed(self) -> bool:
        """Whether the device is past it. Asking waits for nothing."""
        ...

    def wait(self) -> None:
        """The host waits until it is."""
        ...


class Aside(Protocol):
    """Where copies are queued, and the host memory that they use."""

    def queue(self) -> AbstractContextManager[object]:
        """Work inside is queued beside the rounds."""
        ...

    def milestone(self) -> Milestone: ...

    def memory(self, size: int) -> Tensor:
        """uint8 zeros [size] in host memory that the device can reach by itself."""
        ...

    def workspace(self, size: int) -> Tensor | None:
        """uint8 zeros [size] on the device; None where host memory is as near."""
        ...


class _Passed:
    def set(self) -> None: ...

    def passed(self) -> bool:
        return True

    def wait(self) -> None: ...


class HostAside:
    """The CPU: a copy is done when its call returns."""

    def queue(self) -> AbstractContextManager[object]:
        return nullcontext()

    def milestone(self) -> Milestone:
        return _Passed()

    def memory(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def workspace(self, size: int) -> Tensor | None:
        return None


class _CudaMilestone:
    def __init__(self) -> None:
        self._event = _cuda.Event()

    def set(self) -> None:
        self._event.record()

    def passed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class CudaAside:
    """The current CUDA device. Make it after the static tensors: the stream begins behind them."""

    def __init__(self) -> None:
        self._stream = _cuda.Stream()
        self._stream.wait_stream(_cuda.current_stream())

    def queue(self) -> AbstractContextManager[object]:
        return _cuda.stream(self._stream)

    def milestone(self) -> Milestone:
        return _CudaMilestone()

    def memory(self, size: int) -> Tensor:
        memory = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        assert memory.is_pinned(), "a copy from pageable memory makes the host wait"
        return memory

    def workspace(self, size: int) -> Tensor | None:
        with self.queue():
            return torch.zeros(size, dtype=torch.uint8, device="cuda")


def open_aside(device: str) -> Aside:
    """For "cpu" or "cuda"."""
    return CudaAside() if device == "cuda" else HostAside()
