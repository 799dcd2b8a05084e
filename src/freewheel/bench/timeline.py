# SPDX-License-Identifier: Apache-2.0
"""What host and device did when, as a trace that Perfetto and Chrome's tracing page open.

The format is the "JSON array format with object wrapper" of the Trace Event Format: complete events
(`"ph": "X"`) with times in microseconds, and names for processes and threads (`"ph": "M"`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.engine import DeviceTrace, Span
from freewheel.errors import ConfigError

HOST, DEVICE = "host", "device"
PROFILED: tuple[str, ...] = ("CUDA calls of the host", "kernels", "copies")


@dataclass(frozen=True)
class Timeline:
    """`host` and `device` share a clock; `trace`, from another pass, has its own."""

    host: tuple[Span, ...]
    device: tuple[Span, ...]
    trace: DeviceTrace | None = None

    @property
    def lanes(self) -> dict[str, dict[str, tuple[Span, ...]]]:
        """Process -> lane -> spans."""
        lanes = {"rounds as timed": {HOST: self.host, DEVICE: self.device}}
        if self.trace is not None:
            seen = (self.trace.calls, self.trace.kernels, self.trace.copies)
            lanes["rounds under the profiler"] = dict(zip(PROFILED, seen, strict=True))
        return lanes


def write_timeline(file: Path, timelines: Mapping[str, Timeline]) -> None:
    """Write a trace of timelines by title; each begins at 0. Raises OSError."""
    events = [event for n, title in enumerate(timelines) for event in _events(n, title, timelines)]
    body = {"displayTimeUnit": "ms", "traceEvents": events}
    file.write_text(json.dumps(body, separators=(",", ":")), encoding="utf-8")


def _events(
    number: int, title: str, timelines: Mapping[str, Timeline]
) -> Iterator[dict[str, object]]:
    for part, (process, lanes) in enumerate(timelines[title].lanes.items()):
        pid = 10 * number + part + 1
        yield _named("process_name", pid, 0, f"{title}: {process}")
        first = min((s.begin for spans in lanes.values() for s in spans), default=0.0)
        for tid, (lane, spans) in enumerate(lanes.items(), start=1):
            yield _named("thread_name", pid, tid, lane)
            for span in spans:
                yield {
                    "name": span.name,
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "ts": round(1e6 * (span.begin - first), 3),
                    "dur": round(1e6 * span.seconds, 3),
                }


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def read_timeline(file: Path) -> Timeline:
    """The first timeline of a trace that `write_timeline` wrote.

    Raises ConfigError if the file cannot be read or holds no host and device lanes.
    """
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        events: Sequence[dict[str, Any]] = body["traceEvents"]
        lanes = {
            (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
        }
        spans: dict[str, list[Span]] = {HOST: [], DEVICE: []}
        for event in events:
            lane = lanes.get((event["pid"], event["tid"]))
            if event["ph"] == "X" and event["pid"] == 1 and lane in spans:
                begin = event["ts"] * 1e-6
                spans[lane].append(Span(event["name"], begin, begin + event["dur"] * 1e-6))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"timeline: {file} is no trace of bench decode: {error}") from error
    if not spans[HOST] or not spans[DEVICE]:
        raise ConfigError(f"timeline: {file} holds no rounds of host and device")
    return Timeline(tuple(spans[HOST]), tuple(spans[DEVICE]))
