# SPDX-License-Identifier: Apache-2.0
"""`freewheel audit`: count what crosses between host and device."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from freewheel.cli import options as o
from freewheel.cli.later import Later
from freewheel.cli.terminal import answers, counting, fail, open_llm, write_json

if TYPE_CHECKING:
    from freewheel import audit as auditing
    from freewheel.audit import AuditReport
else:
    auditing = Later("freewheel.audit")


def audit(
    model: o.Model,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run, at least.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 4,
    speculate: o.Speculate = "3",
    drafter: o.Drafter = "auto",
    device: o.Device = "auto",
    graph: o.Graph = "auto",
    run_ahead: o.RunAhead = 2,
    chunk: o.Chunk = 64,
    context_len: o.ContextLen = None,
    kv_cache_dtype: o.KvCacheDtype = "auto",
    threads: o.Threads = 1,
    json: o.Json = False,
) -> None:
    """Run a mixed batch under the guard. Fails if a device value reached the host.

    Where rounds are CUDA graphs, PyTorch's profiler counts too, and its counts must agree. In JSON,
    `kernels_per_round` is of the widest decoding round: kernels of its graph, or calls of its tape.
    """
    llm = open_llm(
        model,
        speculate=o.depth(speculate),
        drafter=drafter,
        device=device,
        graph=graph,
        run_ahead=run_ahead,
        chunk=chunk,
        context_len=context_len,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_batch=batch,
        prefill_batch=min(2, batch),
        guard=True,
    )
    line = f"running {rounds} rounds under the guard, and more until the last requests have ended"
    with counting("rounds, at least", rounds, lambda: llm.executor.counters.rounds, line):
        report = auditing.audit(llm, rounds)
    if json:
        write_json(asdict(report) | {"passed": report.passed})
    else:
        _print(report)
    if not report.passed:
        for site in report.sites:
            fail(site)
        raise typer.Exit(1)


def _print(report: AuditReport) -> None:
    by_profiler = () if report.profiler is None else report.profiler.expectations
    kernels = "not counted" if report.kernels_per_round is None else report.kernels_per_round
    for name, value in (
        ("rounds", report.rounds),
        ("tokens", report.tokens),
        ("host reads", report.host_reads),
        ("copies besides letters", report.unplanned_copies),
        ("uploads a round", f"{report.uploads_per_round:g}"),
        ("downloads a round", f"{report.downloads_per_round:g}"),
        ("graph launches a round", f"{report.graph_launches_per_round:g}"),
        ("kernels in the widest decoding round", kernels),
        *((name, f"{count:g}") for name, count, _ in by_profiler),
    ):
        answers.print(f"{name:40}{value}")
    answers.print(report.verdict)
