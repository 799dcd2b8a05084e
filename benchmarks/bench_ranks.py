# SPDX-License-Identifier: Apache-2.0
"""Do two cards decide what one does? `python benchmarks/bench_ranks.py [--models demo,demo-v4]`.

A process each, since each leads ranks of one mesh: one card alone, and each of `--layouts`. Prints,
for each, which of the requests got the tokens of one card, host reads and copies that the guard
counted on every rank, what PyTorch's profiler sees besides letters and launches on rank 0, and
milliseconds a round. Needs two CUDA devices, or `--device cpu`.

With `--at-once` several of them load and capture side by side, which is where most of the time
goes; rounds are then run by one at a time, whoever has locked the file of `--turn`. What one
compiles the next ones find.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import IO, Any

from freewheel import LLM, SamplingParams
from freewheel.audit import mixed_requests, profile_rounds
from freewheel.runtime.parallel.crew import dismiss

Case = tuple[str, str, str]
"""Model, dtype, layout."""

ALONE = "alone"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "tp2": {"tp": 2},
    "tp2-ep-split": {"tp": 2, "ep": True, "split_scan": 256},
    "dp2": {"dp": 2},
    "dp2-ep": {"dp": 2, "ep": True},
    "dp2-ep-few": {"dp": 2, "ep": True, "max_batch": 4},
    "tp2-dp2-ep": {"tp": 2, "dp": 2, "ep": True},
}
"""What each asks for. Of copies with whole experts, rounds of more than 16 tokens a copy exchange
tokens by all-to-all, smaller ones gather them: with 12 requests both come up, and with rows for few
every decoding round gathers."""

PATIENCE = 20.0
"""Seconds to wait for one's turn."""

PROMPTS = ["Emma was", "The king spoke to the people, and said that they", "Call me", "To be or"]


def main() -> None:
    options = _options()
    if options.own:
        print(json.dumps(_answers(options, options.own)), flush=True)
        dismiss()
        return
    cases = [
        (model, dtype, layout)
        for model in options.models.split(",")
        for dtype in options.dtypes.split(",")
        for layout in (ALONE, *options.layouts.split(","))
    ]
    with ThreadPoolExecutor(options.at_once) as threads:
        runs = {
            case: threads.submit(_in_a_process, options, *case, number)
            for number, case in enumerate(cases)
        }
        done: dict[Case, dict[str, Any]] = {}
        for run in as_completed(runs.values()):
            case = next(case for case, own in runs.items() if own is run)
            done[case] = dict(run.result())
            _print_settled(done)


def _print_settled(done: dict[Case, dict[str, Any]]) -> None:
    """Those that can be compared, once each."""
    for (model, dtype, layout), found in done.items():
        alone = done.get((model, dtype, ALONE))
        if alone is None or found.get("printed"):
            continue
        found["printed"] = True
        tokens, wanted = found.get("tokens", []), alone.get("tokens", [])
        same = sum(a == b for a, b in zip(wanted, tokens, strict=False))
        line = {"model": model, "dtype": dtype, "layout": layout, "same": same, "of": len(wanted)}
        kept = {name: of for name, of in found.items() if name not in ("tokens", "printed")}
        print(json.dumps(line | kept), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare one rank with several.")
    parser.add_argument("--models", default="demo,demo-v4")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--layouts", default="tp2,tp2-ep-split,dp2,dp2-ep")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=int, default=600, help="the most that one layout takes")
    parser.add_argument("--at-once", type=int, default=1, help="processes side by side")
    parser.add_argument("--turn", default="", help="a file: whoever locks it runs rounds")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--own", default="", help="a layout: be the process that measures it")
    return parser.parse_args()


def _in_a_process(
    options: argparse.Namespace, model: str, dtype: str, layout: str, number: int
) -> dict[str, Any]:
    """One card alone is one or the other in turn."""
    given = {
        "models": model,
        "dtypes": dtype,
        "requests": options.requests,
        "tokens": options.tokens,
        "batch": options.batch,
        "device": options.device,
        "turn": options.turn,
        "own": layout,
    }
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in given.items())]
    command += ["--deterministic"] * options.deterministic
    seen = {"CUDA_VISIBLE_DEVICES": str(number % 2)} if layout == ALONE else {}
    own = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"} | seen,
        start_new_session=True,
    )
    try:
        told, errors = own.communicate(timeout=options.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(own.pid, signal.SIGABRT)  # all of its processes say where they are
        told, errors = own.communicate()
        print(f"{model} {layout}\n{errors[-6000:]}", file=sys.stderr, flush=True)
        found = json.loads(told.splitlines()[-1]) if told else {}
        return found | {"failed": f"not done after {options.seconds} seconds"}
    if own.returncode:
        print(f"{model} {layout}\n{errors[-3000:]}", file=sys.stderr, flush=True)
        return {"failed": errors.strip().splitlines()[-1:]}
    return json.loads(told.splitlines()[-1])


def _answers(options: argparse.Namespace, layout: str) -> dict[str, Any]:
    """What `_run` finds, once nothing is left to be made."""
    began = time.perf_counter()
    asked: dict[str, Any] = {"max_batch": options.batch} | LAYOUTS[layout]
    llm = LLM(
        options.models,
        dtype=options.dtypes,
        device=options.device,
        chunk=64,
        context_len=512,
        prefill_batch=1,
        guard=True,
        deterministic=options.deterministic,
        **asked,
    )
    llm.capture()
    with open(options.turn or os.devnull, "w", encoding="utf-8") as turn:
        if options.turn:
            _take(turn, PATIENCE)
        return {"layout": layout, "capture_s": round(time.perf_counter() - began, 2)} | _run(
            options, llm
        )


def _take(turn: IO[str], seconds: float) -> None:
    """Lock it, or go on without where somebody keeps it for too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return


def _run(options: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    """Tokens of all requests, and what it took: cold, then from what the caches keep."""
    loaded = time.perf_counter()
    prompts, params = _requests(options)
    first = llm.generate(prompts, params)
    captured = time.perf_counter()
    counters = llm.executor.counters
    rounds = counters.rounds
    again = llm.generate(prompts, params)
    seconds, timed = time.perf_counter() - captured, counters.rounds
    traced = profile_rounds(llm, mixed_requests(llm, 0, False))
    return {
        "first_s": round(captured - loaded, 2),
        "rounds": rounds,
        "ms_a_round": round(1e3 * seconds / max(1, timed - rounds), 3),
        "unplanned": [] if traced is None else [o for o in traced.expectations if o[1] != o[2]],
        "profiled": 0 if traced is None else traced.rounds,
        "host_reads": llm.executor.host_reads(),
        "repeats": sum(a.token_ids == b.token_ids for a, b in zip(first, again, strict=True)),
        "tokens": [one.token_ids for one in first],
    }


def _requests(options: argparse.Namespace) -> tuple[list[str], list[SamplingParams]]:
    """Greedy ones and sampled ones in turn, of prompts of several lengths."""
    count, length = options.requests, options.tokens
    greedy = SamplingParams(temperature=0, max_tokens=length)
    warm = [SamplingParams(temperature=0.8, seed=n, max_tokens=length) for n in range(count)]
    return (
        [f"{PROMPTS[n % len(PROMPTS)]} {'and so on ' * (7 * n)}" for n in range(count)],
        [greedy if n % 3 else warm[n] for n in range(count)],
    )


if __name__ == "__main__":
    main()
