# SPDX-License-Identifier: Apache-2.0
"""Measurements: requests served in this process (`offline`), and rounds of decoding (`decode`).

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
    quantile,
    summary,
)
from freewheel.bench.picture import draw_picture
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
