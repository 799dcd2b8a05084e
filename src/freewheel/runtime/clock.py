# SPDX-License-Identifier: Apache-2.0
"""When the device began and ended something, in the host's seconds, without asking it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from freewheel.graph import Graph

_cuda = cast(Any, torch.cuda)  # half of its members lack types


@dataclass(frozen=True)
class Span:
    """Something that took from `begin` to `end`, in seconds of `time.perf_counter`."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Clock(Protocol):
    """Marks points of the device's work; they may be read once all of it is done."""

    def mark(self) -> Callable[[], float]:
        """Now, in the current stream. What it returns gives the time, once the mark has passed."""
        ...


class HostClock:
    """The device is the CPU: work is done when its call returns."""

    def mark(self) -> Callable[[], float]:
        now = time.perf_counter()
        return lambda: now


class CudaClock:
    """Events. Their distance from one whose time the host took; good to some microseconds."""

    def __init__(self) -> None:
        """Waits for the device once."""
        self._first = _cuda.Event(enable_timing=True)
        _cuda.synchronize()
        self._first.record()
        self._first.synchronize()
        self._began = time.perf_counter()

    def mark(self) -> Callable[[], float]:
        event = _cuda.Event(enable_timing=True)
        event.record()
        return lambda: self._began + 1e-3 * self._first.elapsed_time(event)


class TimedGraph:
    """A captured graph whose replays are marked at both ends; `log` takes each pair of marks."""

    def __init__(
        self,
        graph: Graph[None],
        clock: Clock,
        log: list[tuple[Callable[[], float], Callable[[], float]]],
    ) -> None:
        self._graph, self._clock, self._log = graph, clock, log

    def capture(self, fn: Callable[[], None]) -> None:
        self._graph.capture(fn)

    def replay(self) -> None:
        begin = self._clock.mark()
        self._graph.replay()
        self._log.append((begin, self._clock.mark()))


def open_clock(device: str) -> Clock:
    """A clock for "cpu" or "cuda"."""
    return CudaClock() if device == "cuda" else HostClock()


def wait_for_device(device: str) -> None:
    """Until all that was queued is done: between measurements, never in a round."""
    if device == "cuda":
        _cuda.synchronize()
