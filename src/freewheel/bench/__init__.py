# SPDX-License-Identifier: Apache-2.0
"""Measurements: requests served in this process (`offline`), rounds of decoding (`decode`), single
kernels (`kernels`), and a server under load (`load`, which needs the libraries of the `server`
extra and is not loaded here).

`plans` says what is measured. `timeline` writes what a round's time went on as a trace, `picture`
draws it. May import the engine, `freewheel.config`, `freewheel.spec` and the standard library. Must
never touch a tensor.

Names are loaded when first used, so that a plan can be checked without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freewheel.bench.decode import DecodeRun, bench_decode, decode_summary
    from freewheel.bench.kernels import kernel_summary
    from freewheel.bench.offline import BenchRun, bench, count_differing, summary
    from freewheel.bench.picture import draw_picture
    from freewheel.bench.plans import DecodeBench, Workload, plan_runs
    from freewheel.bench.statistics import quantile
    from freewheel.bench.timeline import Timeline, read_timeline, write_timeline

_HOMES = {
    "decode": ("DecodeRun", "bench_decode", "decode_summary"),
    "kernels": ("kernel_summary",),
    "offline": ("BenchRun", "bench", "count_differing", "summary"),
    "picture": ("draw_picture",),
    "plans": ("DecodeBench", "Workload", "plan_runs"),
    "statistics": ("quantile",),
    "timeline": ("Timeline", "read_timeline", "write_timeline"),
}

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
    "kernel_summary",
    "plan_runs",
    "quantile",
    "read_timeline",
    "summary",
    "write_timeline",
]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return vars(import_module(f"freewheel.bench.{home}"))[name]
    raise AttributeError(f"module 'freewheel.bench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
