# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's profiler saw of a stretch of rounds: kernels, copies, launches and waits.

On a CUDA device the profiler hears of them from CUPTI, so these counts owe nothing to our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.profiler import DeviceType, ProfilerActivity, profile

from freewheel.runtime.clock import Span, wait_for_device

WAITS = frozenset({"cudaStreamSynchronize", "cudaMemcpy", "aten::_local_scalar_dense"})
"""Calls that make the host wait for a stream or a value. Awaiting an event, as the mailbox does
for a letter, is another call."""


@dataclass(frozen=True)
class DeviceTrace:
    """Seen while something ran, in seconds since the profiler began.

    `calls`: the host's calls of the CUDA runtime. `waits`: how many were of WAITS.
    """

    kernels: tuple[Span, ...]
    copies: tuple[Span, ...]
    calls: tuple[Span, ...]
    waits: int

    @property
    def uploads(self) -> int:
        return sum("HtoD" in span.name for span in self.copies)

    @property
    def downloads(self) -> int:
        return sum("DtoH" in span.name for span in self.copies)

    @property
    def graph_launches(self) -> int:
        return sum("GraphLaunch" in span.name for span in self.calls)

    @property
    def kernel_seconds(self) -> float:
        """Time in which at least one kernel ran."""
        return covered(self.kernels)


def traced(run: Callable[[], object]) -> DeviceTrace:
    """Call `run` under the profiler, on a CUDA device."""
    wait_for_device("cuda")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as seen:
        run()
        wait_for_device("cuda")
    return read_trace(
        (
            Span(event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6),
            event.device_type == DeviceType.CUDA,
        )
        for event in seen.events() or ()
    )


def read_trace(events: Iterable[tuple[Span, bool]]) -> DeviceTrace:
    """Sort events, each with whether it happened on the device."""
    kernels: list[Span] = []
    copies: list[Span] = []
    calls: list[Span] = []
    waits = 0
    for span, on_device in events:
        if on_device:
            (copies if span.name.startswith(("Memcpy", "Memset")) else kernels).append(span)
        elif span.name.startswith("cu"):
            calls.append(span)
        waits += span.name in WAITS
    return DeviceTrace(tuple(kernels), tuple(copies), tuple(calls), waits)


def covered(spans: Iterable[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.begin):
        total += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return total
