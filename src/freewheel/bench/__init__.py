# SPDX-License-Identifier: Apache-2.0
"""Measurements: requests served in this process (`offline`), rounds of decoding (`decode`), and a
server under load (`load`, which needs the libraries of the `server` extra and is not loaded here).

`timeline` writes what a round's time went on as a trace, `picture` draws it. May import the engine,
`freewheel.config`, `freewheel.spec` and the standard library. Must never touch a tensor.
"""

from __future__ import annotations

from freewheel.bench.decode import DecodeBench, DecodeRun, bench_decode, decode_summary
from freewheel.bench.offline import (
    BenchRun,
    Workload,
    bench,
    count_differing,
    plan_runs,
    summary,
)
from freewheel.bench.picture import draw_picture
from freewheel.bench.statistics import quantile
from freewheel.bench.timeline import Timeline, read_timeline, write_timeline

__all__ = [
    "BenchRun",
    "DecodeBench",
    "DecodeRun",
    "Timeline",
    "Workload",
    "bench",
    "bench_decode",
    "count_differing",
    "decode_summary",
    "draw_picture",
    "plan_runs",
    "quantile",
    "read_timeline",
    "summary",
    "write_timeline",
]
