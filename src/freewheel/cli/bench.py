# SPDX-License-Identifier: Apache-2.0
"""`freewheel bench`: how fast a fixed workload is served without a server, and its other verbs.

`freewheel bench MODEL` is short for `freewheel bench offline MODEL`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from freewheel.bench import Workload, plan_runs
from freewheel.cli import bench_decode, bench_kernels, bench_serve
from freewheel.cli import options as o
from freewheel.cli.hinting import Hinting, UsageError
from freewheel.cli.later import Later
from freewheel.cli.terminal import answers, open_llm, table, write_json
from freewheel.config import find_model
from freewheel.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from freewheel.bench import BenchRun
    from freewheel.bench import offline as measuring
else:
    measuring = Later("freewheel.bench.offline")

PROMPT_TOKENS = 64

VERBS_ELSEWHERE = ("throughput", "latency", "startup", "sweep")
"""Of vLLM's `bench`."""

HELP = (
    "Time a fixed workload for each batch and number of drafts.\n\n"
    "Each run has a new engine. Loading, capture of all graphs and a warm-up come first and do not "
    "count; the first load of a process loads libraries too. Then a request is queued whenever "
    "fewer than the batch are under way; all runs serve the same requests. An answer has exactly "
    "--max-tokens tokens: end-of-sequence ids do not end it.\n\n"
    "TTFT: from queueing a request until the host has its first token. TPOT: time per output token "
    "after a request's first. ITL: time between the letters that brought a request tokens; with "
    "drafts a letter brings several. Percentiles interpolate linearly. Tokens a round count the "
    "round that ends the prompt. Accepted by position: of the drafts verified there. Differing "
    "tokens: against the first run.\n\n"
    "Drafts on random ids are not drafts on text: use --prompt-file to measure acceptance."
)

Batches = Annotated[str, typer.Option(help="Requests under way together; one run for each.")]
Depths = Annotated[str, typer.Option(help="Drafts a round, 0 to 7; one run for each.")]
PromptTokens = Annotated[
    int | None,
    typer.Option(help=f"Random token ids of each prompt; {PROMPT_TOKENS} if there is no file."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(help="Take prompts from this text file, one a line; empty lines are no prompts."),
]
Requests = Annotated[
    int | None,
    typer.Option(
        help="Requests of each run; default: the file's lines, or twice the largest batch."
    ),
]


def offline(
    model: o.Model,
    batch: Batches = "1,4,8",
    speculate: Depths = "0,3",
    prompt_tokens: PromptTokens = None,
    prompt_file: PromptFile = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 64,
    requests: Requests = None,
    temperature: o.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Draws random prompts and seeds requests.")] = 0,
    drafter: o.Drafter = "auto",
    device: o.Device = "auto",
    graph: o.Graph = "auto",
    run_ahead: o.RunAhead = 2,
    chunk: o.Chunk = 256,
    context_len: o.ContextLen = None,
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    threads: o.Threads = 1,
    deterministic: o.Deterministic = False,
    json: o.Json = False,
) -> None:
    """Time a fixed workload for each batch and number of drafts. `HELP` says what is measured."""
    batches, depths = o.numbers("batch", batch), o.numbers("speculate", speculate)
    configs = plan_runs(
        model,
        batches,
        depths,
        drafter=drafter,
        device=device,
        graph=graph,
        run_ahead=run_ahead,
        chunk=chunk,
        context_len=context_len,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        deterministic=deterministic,
    )
    if prompt_file is not None and prompt_tokens is not None:
        raise RequestError("prompt_tokens", "has no meaning with --prompt-file; give one of them")
    texts = () if prompt_file is None else _read_lines(prompt_file)
    workload = Workload(
        requests=(len(texts) or 2 * max(batches)) if requests is None else requests,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        prompt_tokens=PROMPT_TOKENS if prompt_tokens is None else prompt_tokens,
        texts=texts,
    )
    find_model(model)
    runs: list[BenchRun] = []
    for run in measuring.bench(configs, workload, open_llm):
        if not json and not runs:
            _print_head(model, workload, run)
        if not json:
            answers.print(_row(measuring.summary(run)))
        runs.append(run)
    if json:
        write_json(_as_object(model, workload, runs))


def _read_lines(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("prompt_file", str(error)) from error
    texts = tuple(line for line in lines if line.strip())
    if not texts:
        raise RequestError("prompt_file", f"{file} holds no prompt")
    return texts


def _as_object(model: str, workload: Workload, runs: list[BenchRun]) -> dict[str, Any]:
    first, work = runs[0], asdict(workload)
    if workload.texts:
        del work["prompt_tokens"]
    del work["texts"]
    return {
        "model": model,
        "machine": asdict(first.machine),
        "dtype": first.resolved.dtype,
        "graph": first.resolved.graph,
        "context_len": first.context_len,
        "workload": {"prompts": workload.source, **work, "ignore_eos": True},
        "runs": [measuring.summary(run) for run in runs],
    }


COLUMNS = (
    ("batch", 5),
    ("drafts", 6),
    ("tokens/s", 9),
    ("req/s", 8),
    ("TTFT ms mean/median/p99", 25),
    ("TPOT ms mean/median/p99", 25),
    ("ITL ms mean/median/p99", 25),
    ("tok/round", 9),
    ("accepted", 8),
    ("rounds", 6),
    ("ms/round", 8),
    ("load s", 7),
    ("capture s", 9),
    ("late captures", 13),
    ("differing tokens", 16),
)
"""Headings and widths; what was accepted by position follows them."""


def _print_head(model: str, workload: Workload, run: BenchRun) -> None:
    machine, resolved = run.machine, run.resolved
    answers.print(
        f"{model} on {machine.device} ({machine.processor}), {resolved.dtype}, {resolved.graph} "
        f"graphs, {machine.threads} threads, torch {machine.torch_version}"
    )
    answers.print(
        f"{workload.requests} requests: {workload.source}; {workload.max_tokens} tokens of answer, "
        f"temperature {workload.temperature:g}"
    )
    if not workload.texts:
        answers.print("random ids are not text: for acceptance on text, give --prompt-file")
    answers.print(table(COLUMNS, "accepted by position").head())


def _row(result: dict[str, Any]) -> str:
    """One line of the table."""
    cells = (
        result["max_concurrency"],
        result["speculate"],
        f"{result['output_throughput']:.1f}",
        f"{result['request_throughput']:.3g}",
        *(_three(result, name) for name in ("ttft", "tpot", "itl")),
        f"{result['tokens_per_round']:.2f}",
        _number(result["spec_decode_acceptance_rate"], "{:.1f}%"),
        result["rounds"],
        f"{result['mean_round_ms']:.2f}",
        f"{result['load_seconds']:.1f}",
        f"{result['capture_seconds']:.1f}",
        result["late_captures"],
        result["differing_tokens"],
    )
    pairs = zip(result["accepted_per_position"], result["drafted_per_position"], strict=True)
    positions = " ".join(f"{accepted}/{drafted}" for accepted, drafted in pairs)
    return table(COLUMNS).row(cells, positions or "-")


def _three(result: dict[str, Any], name: str) -> str:
    keys = (f"{kind}_{name}_ms" for kind in ("mean", "median", "p99"))
    return " / ".join(_number(result[key], "{:.1f}") for key in keys)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _means_a_verb(args: list[str]) -> bool:
    """Two words in a row are no model: a model stands alone, with options behind it."""
    words = [word for word in args[:2] if not word.startswith("-")]
    if not words or words[0] != args[0]:
        return False
    try:
        find_model(words[0])
    except CheckpointError:
        return len(words) == 2 or words[0] in VERBS_ELSEWHERE
    return False


class OfflineByDefault(TyperGroup):
    """Whatever begins with none of its verbs is for `offline`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises a usage error for a verb that there is not."""
        if args and args[0] not in self.commands and args[0] != "--help":
            if _means_a_verb(args):
                raise UsageError(
                    f"No such verb: {args[0]}; there are {', '.join(sorted(self.commands))}. "
                    "`bench offline MODEL` measures throughput and latency without a server",
                    ctx=ctx,
                )
            args = ["offline", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=OfflineByDefault,
    no_args_is_help=True,
    help=(
        "Time requests, rounds of decoding, kernels, or a server. `bench MODEL` is "
        "`bench offline MODEL`."
    ),
)
app.command("offline", cls=Hinting, help=HELP)(offline)
app.command("decode", cls=Hinting, help=bench_decode.HELP)(bench_decode.decode)
app.command("kernels", cls=Hinting, help=bench_kernels.HELP)(bench_kernels.kernels)
app.command("picture", cls=Hinting)(bench_decode.picture)
app.command("serve", cls=Hinting, help=bench_serve.HELP)(bench_serve.serve)
