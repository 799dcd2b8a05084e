# SPDX-License-Identifier: Apache-2.0
"""How long a round of decoding takes, what runs in it, and what crosses to and from the host.

Rows stand at a given context; drafts are right at a given rate if one is given. Rounds, scheduler
and letters are the product's; only prompts are skipped.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from freewheel.bench.plans import COUNTED, WARM, DecodeBench
from freewheel.bench.statistics import quantile
from freewheel.bench.timeline import Timeline
from freewheel.config import EngineConfig
from freewheel.engine import (
    Machine,
    Resolved,
    Span,
    SteadyCounts,
    SteadyDecode,
    SteadyRun,
    covered,
)
from freewheel.errors import ConfigError


@dataclass(frozen=True)
class DecodeRun:
    """One batch, measured at one delay of the host."""

    batch: int
    slow_host: float
    resolved: Resolved
    machine: Machine
    capture_seconds: float
    run: SteadyRun
    counts: SteadyCounts
    late_captures: int
    late_kernels: int

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.run.host, self.run.device, self.counts.trace)


def bench_decode(plan: DecodeBench, config: EngineConfig) -> Iterator[DecodeRun]:
    """Measure each batch at each delay, in turn, on one engine; `config` is the plan's.

    Raises ConfigError where drafts are to be right and the model has nothing that drafts always.
    """
    steady = SteadyDecode(config, plan.batches, plan.accept, plan.longest_run)
    resolved = steady.built.resolved
    if plan.accept is not None and plan.accept > 1 and resolved.drafter != "mtp":
        raise ConfigError(
            f"accept: needs a multi-token-prediction layer, which drafts in every round; this "
            f"engine's drafter is {resolved.drafter}"
        )
    gc.collect()
    captured = {batch: steady.capture(batch) for batch in sorted(set(plan.batches), reverse=True)}
    for batch, slow_host in itertools.product(plan.batches, plan.slow_hosts):
        counters = steady.executor.counters
        late = counters.late_captures, counters.late_kernels
        run = steady.run(batch, plan.rounds, slow_host / 1000, WARM)
        yield DecodeRun(
            batch=batch,
            slow_host=slow_host,
            resolved=resolved,
            machine=Machine.here(resolved.device),
            capture_seconds=captured[batch],
            run=run,
            counts=steady.count(batch, COUNTED),
            late_captures=counters.late_captures - late[0],
            late_kernels=counters.late_kernels - late[1],
        )


def decode_summary(plan: DecodeBench, found: DecodeRun) -> dict[str, Any]:
    """Figures of one batch. Where a CUDA device was traced, counts are the profiler's.

    `ms_per_round`: the host's time from letter to letter. `device_ms_per_round`: median, from a
    graph's start to its end. `between_rounds_share`: of the device's time, what lies between one
    graph and the next. `busy_share`: of `ms_per_round`, the time in which some kernel runs (on a
    CPU: in which the graph replays). `kernels_per_round`: on a CPU, operator calls of the tape.
    """
    run, counts = found.run, found.counts
    milliseconds = 1000 * run.seconds / run.rounds
    each = sorted(1000 * span.seconds for span in run.device)
    trace = counts.trace
    kernel_ms = None if trace is None else 1000 * trace.kernel_seconds / counts.rounds
    seen = counts if trace is None else trace
    return {
        "batch": found.batch,
        "context": plan.context,
        "speculate": plan.speculate,
        "accept": plan.accept,
        "tokens_per_round": run.tokens / run.rounds / run.rows,
        "tokens_per_second": run.tokens / run.seconds,
        "ms_per_round": milliseconds,
        "device_ms_per_round": quantile(each, 0.5),
        "between_rounds_share": between_rounds(run.device),
        "kernel_ms_per_round": kernel_ms,
        "busy_share": (sum(each) / run.rounds if kernel_ms is None else kernel_ms) / milliseconds,
        "kernels_per_round": (
            counts.calls if trace is None else len(trace.kernels) / counts.rounds
        ),
        "host_reads": counts.host_reads,
        "waits": None if trace is None else trace.waits,
        "uploads_per_round": seen.uploads / counts.rounds,
        "downloads_per_round": seen.downloads / counts.rounds,
        "graph_launches_per_round": seen.graph_launches / counts.rounds,
        "late_captures": found.late_captures,
        "late_kernels": found.late_kernels,
        "capture_seconds": found.capture_seconds,
        "rounds": run.rounds,
        "slow_host_ms": found.slow_host,
    }


def between_rounds(device: tuple[Span, ...]) -> float | None:
    """Share of the time from the first round's begin to the last's end that no round covers."""
    if not device:
        return None
    whole = max(span.end for span in device) - min(span.begin for span in device)
    return max(0.0, 1 - covered(device) / whole)
