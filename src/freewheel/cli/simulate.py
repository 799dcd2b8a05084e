# SPDX-License-Identifier: Apache-2.0
"""`freewheel simulate`: a trace through the real scheduler and caches, on no device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from freewheel.cli import options as o
from freewheel.cli.terminal import answers, fail, messages, write_json
from freewheel.cli.what_if import VARIED, combinations, table_row
from freewheel.config import EngineConfig
from freewheel.errors import ConfigError
from freewheel.simulate import (
    UNLIMITED,
    Made,
    Replay,
    RoundCost,
    Trace,
    default_cache,
    make,
    read_measured,
    read_trace,
    report,
    simulation,
    write_trace,
)

HELP = (
    "Replay a trace through the engine's own scheduler, pages and prefix cache, on a clock of its "
    "own: no weights are read, nothing is computed.\n\n"
    "TRACE is JSONL in Mooncake's format: timestamp (ms), input_length, output_length, hash_ids "
    "(of blocks of --block tokens); priority and tenant may stand beside them, and ids past the "
    "prompt's are the answer's. --make writes it first: conversations of several turns that share "
    f"system prompts; say any of {', '.join(one.name for one in fields(Made)[:-2])}.\n\n"
    "A round takes --fixed-ms, and --token-us for each token of its rectangle, and --key-ns for "
    "each token behind its rows; decoding rounds take what --costs FILE measured (written by "
    "bench decode --json). --accept: the share of rounds in which the first draft is right, the "
    "first two, and so on; those beyond --speculate are not looked at. --pages "
    "unlimited is the bound that no cache can beat.\n\n"
    "--vary max-batch=8,32 --vary speculate=0,3 replays once for each combination, and prints a "
    f"line of each: any of {', '.join(name.replace('_', '-') for name in VARIED)}."
)


CacheBytes = Annotated[
    int | None,
    typer.Option(help="Budget of the paged cache; default: 2^30, or four full contexts."),
]


def simulate(
    trace: Annotated[Path, typer.Argument(help="JSONL, one request a line.")],
    model: Annotated[
        str, typer.Option(help="A folder, a config.json, or a shipped model; no weights needed.")
    ] = "demo",
    pages: Annotated[
        str | None, typer.Option(help="Pages, or unlimited; default: what --cache-bytes holds.")
    ] = None,
    cache_bytes: CacheBytes = None,
    page_size: Annotated[
        int | None, typer.Option(help="Tokens of a page; default: model's.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Requests decoded together.")] = 64,
    prefill_batch: Annotated[int, typer.Option(help="Prompts computed together.")] = 4,
    chunk: o.Chunk = 4096,
    context_len: o.ContextLen = None,
    kv_cache_dtype: o.KvCacheDtype = "auto",
    run_ahead: o.RunAhead = 2,
    speculate: Annotated[int, typer.Option(help="Drafts of every round.")] = 3,
    accept: Annotated[str, typer.Option(help="Shares between commas.")] = "0.8,0.6,0.45",
    prefill_share: Annotated[float, typer.Option(help="Of contested rounds, the prompts'.")] = 0.5,
    prefix_cache: Annotated[bool, typer.Option(help="Keep pages of ended requests.")] = True,
    fixed_ms: Annotated[float, typer.Option(help="Of every round.")] = 8.0,
    token_us: Annotated[float, typer.Option(help="Of each token of a rectangle.")] = 10.0,
    key_ns: Annotated[float, typer.Option(help="Of each token behind a row.")] = 1.0,
    costs: Annotated[
        list[Path] | None, typer.Option(help="Measured decoding rounds; may be repeated.")
    ] = None,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a hash id.")] = 512,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests, at most.")] = None,
    seed: Annotated[int, typer.Option(help="Of drafts' luck, and of --make.")] = 0,
    make_trace: Annotated[
        str | None, typer.Option("--make", help="Write TRACE first: conversations=200,turns=5")
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option(help="An option's values: pages=500,1000; repeatable.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Replay a trace through the real scheduler and caches. `HELP` says how."""
    given: dict[str, Any] = locals()
    varied = tuple(combinations(vary or (), given))
    if make_trace is not None:
        _write(trace, _made(make_trace, block, seed))
    found = read_trace(trace, block, limit)
    about = {"trace": str(trace), "ignored": found.ignored}
    if found.ignored:
        messages.print(f"fields that nothing here reads: {', '.join(found.ignored)}", markup=False)
    runs: list[dict[str, Any]] = []
    for one in varied:
        runs.append(replayed(given | one, found))
        if vary and not json:
            answers.print(table_row(one, runs[-1], first=len(runs) == 1), markup=False)
    if json:
        write_json(about | (_named(varied, runs) if vary else runs[0]))
    elif not vary:
        _print(runs[0])
    if not any(run["served"] for run in runs):
        fail("no request could be served; give more pages, or unlimited")
        raise typer.Exit(1)


def _named(varied: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"runs": [{"varied": one} | run for one, run in zip(varied, runs, strict=True)]}


def replayed(given: dict[str, Any], trace: Trace) -> dict[str, Any]:
    """Figures of one replay, and of what. `given`: values of the command's options."""
    given = given | {"prefill_batch": min(given["prefill_batch"], given["max_batch"])}
    config = EngineConfig(
        **{
            one.name: given[one.name]
            for one in fields(EngineConfig)
            if one.name in given and (one.name, given[one.name]) != ("cache_bytes", None)
        }
    )
    if given["cache_bytes"] is None:
        config = replace(config, cache_bytes=default_cache(config, trace))
    cost = RoundCost(
        given["fixed_ms"] / 1e3,
        given["token_us"] / 1e6,
        given["key_ns"] / 1e9,
        read_measured(tuple(given["costs"] or ())),
    )
    accept, pages = _shares(given["accept"]), _pages(given["pages"])
    plan = simulation(config, trace, accept, cost, pages, given["seed"])
    begun = time.process_time()
    outcome = Replay(plan, trace).run()
    return report(outcome, time.process_time() - begun) | _asked(plan.config)


def _write(trace: Path, made: Made) -> None:
    """Make a trace. Raises ConfigError for a place that is taken."""
    if trace.exists() or trace.is_symlink():
        raise ConfigError(
            f"trace: {trace} is there already; give a place that is not, or leave out --make"
        )
    write_trace(trace, make(made).calls)


def _made(text: str, block: int, seed: int) -> Made:
    """Of `name=number` between commas. Raises ConfigError for a name or number that is none."""
    given: dict[str, Any] = {"block": block, "seed": seed}
    kinds = {one.name: type(one.default) for one in fields(Made)[:-2]}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in kinds:
            raise ConfigError(f"make: {name!r} is none of {', '.join(kinds)}")
        try:
            given[name.strip()] = kinds[name.strip()](value)
        except ValueError as error:
            raise ConfigError(f"make: {name} must be a number, got {value!r}") from error
    return Made(**given)


def _asked(config: EngineConfig) -> dict[str, Any]:
    """The engine that was simulated."""
    names = "model speculate run_ahead chunk max_batch prefill_batch prefix_cache prefill_share"
    wanted = names.split()
    return {"engine": {name: value for name, value in asdict(config).items() if name in wanted}}


def _pages(text: str | None) -> int | None:
    if text is None:
        return None
    if text == "unlimited":
        return UNLIMITED
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 40):
        raise ConfigError(f"pages: must be a number above 0, or unlimited; got {text!r}")
    return int(text)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"accept: must be numbers with commas between, got {text!r}") from error


def _print(figures: dict[str, Any]) -> None:
    rounds = figures["rounds"]
    answers.print(
        f"{figures['served']:,} of {figures['requests']:,} requests served in "
        f"{figures['seconds']:,.1f} s of simulated time"
    )
    for field, count in figures["refused"].items():
        answers.print(f"  {count:,} refused for their {field}")
    _row("prompt tokens", f"{figures['prompt_tokens']:,}, {figures['hit_rate']:.2%} found")
    _row(
        "answer tokens",
        f"{figures['answer_tokens']:,}, {figures['answer_tokens_per_second']:,.1f} a second",
    )
    for name in ("ttft", "tpot", "e2e"):
        times = figures[f"{name}_ms"] or {}
        shown = "  ".join(f"{key} {value:,.1f}" for key, value in times.items())
        _row(f"{name}, ms", shown or "-")
    _row(
        "rounds",
        f"{rounds['prompts']:,} for prompts, {rounds['decoding']:,} of decoding; the device is "
        f"busy {figures['device_busy_share']:.0%} of the time",
    )
    _row("preemptions", f"{figures['preemptions']:,}")
    for use in figures["pages"]:
        _row(
            f"{use['group']} pages",
            f"{use['total']:,}; owned {use['mean_owned']:,.0f} on average, {use['peak_owned']:,} "
            f"at most; with those kept {use['mean_held']:,.0f} and {use['peak_held']:,}",
        )
    _row("replayed at", f"{figures['replayed_requests_per_second']:,.0f} requests a CPU second")


def _row(name: str, value: str) -> None:
    answers.print(f"  {name:20}{value}")
