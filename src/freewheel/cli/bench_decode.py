# SPDX-License-Identifier: Apache-2.0
"""`freewheel bench decode` and `freewheel bench picture`: where the time of a round goes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freewheel.bench import DecodeBench
from freewheel.cli import options as o
from freewheel.cli.driver import check_early
from freewheel.cli.later import Later
from freewheel.cli.terminal import answers, messages, table, write_json
from freewheel.config import find_model
from freewheel.errors import ConfigError

if TYPE_CHECKING:
    from freewheel.bench import (
        DecodeRun,
    )
    from freewheel.bench import (
        decode as measuring,
    )
    from freewheel.bench import (
        picture as drawing,
    )
    from freewheel.bench import (
        timeline as traces,
    )
else:
    measuring = Later("freewheel.bench.decode")
    drawing = Later("freewheel.bench.picture")
    traces = Later("freewheel.bench.timeline")

HELP = (
    "Time rounds of decoding in a steady state, for each batch.\n\n"
    "Rows are put at --context tokens over caches of random numbers; from there on the rounds, the "
    "scheduler and the letters are an engine's own. With --accept, drafts are right so often that "
    "a round decides so many tokens of a row on average; without it, as the model has it, which on "
    "random tokens says nothing. --load-format dummy needs a config.json alone.\n\n"
    "ms/round: from letter to letter, by the host's clock. device: a graph from its start to its "
    "end. between: of the device's time, what lies between graphs. busy: of ms/round, the time in "
    "which a kernel runs. On a CUDA device kernels, copies, launches and waits are counted by the "
    "profiler in a pass of its own; elsewhere kernels are the tape's operator calls."
)

ModelName = Annotated[
    str, typer.Option(help="As MODEL elsewhere; with --load-format dummy also a config.json.")
]
Context = Annotated[int, typer.Option(help="Tokens behind each row when it begins.")]
Accept = Annotated[
    float | None,
    typer.Option(help="Tokens that a round decides of each row: 1 to 1 + drafts."),
]
SlowHost = Annotated[
    str, typer.Option(help="Milliseconds that the host sleeps in every turn; one run for each.")
]
TimelineFile = Annotated[
    Path | None, typer.Option(help="Write a trace of host and device there, for Perfetto.")
]


def decode(
    model: ModelName = "demo",
    batch: Annotated[str, typer.Option(help="Rows at once; one run for each.")] = "1,8,32",
    context: Context = 4096,
    speculate: o.Drafts = 3,
    accept: Accept = None,
    rounds: Annotated[int, typer.Option(help="Rounds that are timed.")] = 50,
    load_format: o.LoadFormat = "safetensors",
    slow_host: SlowHost = "0",
    drafter: o.Drafter = "auto",
    device: o.Device = "auto",
    graph: o.Graph = "auto",
    run_ahead: o.RunAhead = 2,
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    threads: o.Threads = 1,
    deterministic: o.Deterministic = False,
    tp: o.Tp = 1,
    dp: o.Dp = 1,
    ep: o.Ep = False,
    timeline: TimelineFile = None,
    json: o.Json = False,
) -> None:
    """Time rounds of decoding. `HELP` says what is measured."""
    plan = DecodeBench(
        model=model,
        batches=tuple(o.numbers("batch", batch)),
        context=context,
        speculate=speculate,
        accept=accept,
        rounds=rounds,
        slow_hosts=_milliseconds(slow_host),
    )
    config = plan.config(
        load_format=load_format,
        drafter=drafter,
        device=device,
        graph=graph,
        run_ahead=run_ahead,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        deterministic=deterministic,
        tp=tp,
        dp=dp,
        ep=ep,
    )
    find_model(check_early(config).model, load_format)
    messages.print(f"loading {model}", markup=False, soft_wrap=True)
    runs: list[DecodeRun] = []
    for run in measuring.bench_decode(plan, config):
        if not json and not runs:
            _print_head(plan, run, run_ahead)
        if not json:
            answers.print(_row(measuring.decode_summary(plan, run)))
        runs.append(run)
    if timeline is not None:
        _write_timeline(timeline, runs)
    if json:
        write_json(_as_object(plan, runs, load_format, run_ahead))


def _write_timeline(file: Path, runs: list[DecodeRun]) -> None:
    titles = (f"batch {run.batch}, host slowed by {run.slow_host:g} ms" for run in runs)
    traces.write_timeline(file, dict(zip(titles, (run.timeline for run in runs), strict=True)))


def picture(
    out: Annotated[Path, typer.Argument(help="The picture's file; its name ends in .svg.")],
    timeline: Annotated[
        Path | None, typer.Option(help="Draw from this trace of `bench decode --timeline`.")
    ] = None,
    model: ModelName = "demo",
    context: Context = 1024,
    batch: Annotated[int, typer.Option(help="Rows at once.")] = 1,
    speculate: o.Drafts = 3,
    load_format: o.LoadFormat = "safetensors",
    slow_host: Annotated[float, typer.Option(help="Milliseconds of sleep in every turn.")] = 0.0,
    device: o.Device = "auto",
    run_ahead: o.RunAhead = 2,
) -> None:
    """Draw one round: what the host does while the device runs it.

    Of a trace that was written before, or else of rounds that are run now.
    """
    if out.suffix != ".svg":
        raise ConfigError(f"out: pictures are SVG, so the name must end in .svg, got {out.name!r}")
    if not out.parent.is_dir():
        raise ConfigError(f"out: there is no folder {out.parent}")
    if timeline is not None:
        _write(out, drawing.draw_picture(traces.read_timeline(timeline), timeline.name))
        return
    plan = DecodeBench(
        model=model,
        batches=(batch,),
        context=context,
        speculate=speculate,
        rounds=12,
        slow_hosts=(slow_host,),
    )
    config = plan.config(load_format=load_format, device=device, run_ahead=run_ahead)
    find_model(check_early(config).model, load_format)
    (run,) = measuring.bench_decode(plan, config)
    title = (
        f"{Path(model).stem} on {run.machine.processor}: {batch} x {1 + speculate} tokens, "
        f"{context} behind them, {run_ahead} rounds ahead"
    )
    _write(out, drawing.draw_picture(run.timeline, title))


def _write(out: Path, picture: str) -> None:
    out.write_text(picture, encoding="utf-8")
    messages.print(f"written to {out}", markup=False, soft_wrap=True)


def _milliseconds(text: str) -> tuple[float, ...]:
    """Numbers between commas. Raises ConfigError for anything else."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"slow_host: must be numbers with commas between, got {text!r}"
        ) from error


COLUMNS = (
    ("batch", 5),
    ("slow ms", 7),
    ("ms/round", 9),
    ("device", 9),
    ("tokens/s", 10),
    ("tok/round", 9),
    ("kernels", 8),
    ("busy", 6),
    ("between", 8),
    ("reads", 5),
    ("up", 4),
    ("down", 4),
    ("launches", 8),
    ("waits", 5),
    ("late", 5),
    ("capture s", 9),
)
"""Headings and widths."""


def _print_head(plan: DecodeBench, run: DecodeRun, run_ahead: int) -> None:
    machine, resolved = run.machine, run.resolved
    answers.print(
        f"{plan.model} on {machine.device} ({machine.processor}), {resolved.dtype}, "
        f"{resolved.graph} graphs, torch {machine.torch_version}"
    )
    forced = "as the model drafts" if plan.accept is None else f"{plan.accept:g} tokens a round"
    answers.print(
        f"{plan.rounds} rounds at {plan.context} tokens, {plan.speculate} drafts, {forced}; "
        f"{run_ahead} rounds ahead"
    )
    answers.print(table(COLUMNS).head())


def _row(result: dict[str, Any]) -> str:
    cells = (
        result["batch"],
        f"{result['slow_host_ms']:g}",
        f"{result['ms_per_round']:.3f}",
        f"{result['device_ms_per_round']:.3f}",
        f"{result['tokens_per_second']:.1f}",
        f"{result['tokens_per_round']:.2f}",
        _number(result["kernels_per_round"]),
        f"{result['busy_share']:.1%}",
        f"{result['between_rounds_share']:.2%}",
        result["host_reads"],
        _number(result["uploads_per_round"]),
        _number(result["downloads_per_round"]),
        _number(result["graph_launches_per_round"]),
        _number(result["waits"]),
        result["late_captures"] + result["late_kernels"],
        f"{result['capture_seconds']:.1f}",
    )
    return table(COLUMNS).row(cells)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _as_object(
    plan: DecodeBench, runs: list[DecodeRun], load_format: str, run_ahead: int
) -> dict[str, Any]:
    first = runs[0]
    return {
        "model": plan.model,
        "load_format": load_format,
        "machine": asdict(first.machine),
        "dtype": first.resolved.dtype,
        "graph": first.resolved.graph,
        "drafter": first.resolved.drafter,
        "run_ahead": run_ahead,
        "runs": [measuring.decode_summary(plan, run) for run in runs],
    }
