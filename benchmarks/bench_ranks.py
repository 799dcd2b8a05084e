# SPDX-License-Identifier: Apache-2.0
"""Do two cards decide what one does? `python benchmarks/bench_ranks.py [--models demo,demo-v4]`.

One process after another, since each leads ranks of one mesh: first one card alone, then each of
`--layouts`. Prints, for each, which of the requests got the tokens of one card, host reads and
copies that the guard counted on every rank, and milliseconds a round. Needs two CUDA devices, or
`--device cpu`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from freewheel import LLM, SamplingParams
from freewheel.runtime.parallel.crew import dismiss

ALONE = "alone"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "tp2": {"tp": 2},
    "tp2-ep-split": {"tp": 2, "ep": True, "split_scan": 256},
    "dp2": {"dp": 2},
    "dp2-ep": {"dp": 2, "ep": True},
    "tp2-dp2-ep": {"tp": 2, "dp": 2, "ep": True},
}
"""What each asks for. Of copies with whole experts, rounds of more than 16 tokens a copy exchange
tokens by all-to-all, smaller ones gather them: with 12 requests both come up."""

PROMPTS = ["Emma was", "The king spoke to the people, and said that they", "Call me", "To be or"]


def main() -> None:
    options = _options()
    if options.own:
        print(json.dumps(_answers(options, options.own)), flush=True)
        dismiss()
        return
    for model in options.models.split(","):
        for dtype in options.dtypes.split(","):
            alone: list[Any] = []
            for layout in (ALONE, *options.layouts.split(",")):
                found = _in_a_process(options, model, dtype, layout)
                tokens = found.pop("tokens", [])
                alone = alone or tokens
                same = [a == b for a, b in zip(alone, tokens, strict=False)]
                line = {"model": model, "dtype": dtype, "layout": layout, "same": sum(same)}
                print(json.dumps(line | {"of": len(alone)} | found), flush=True)


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
    parser.add_argument("--own", default="", help="a layout: be the process that measures it")
    return parser.parse_args()


def _in_a_process(
    options: argparse.Namespace, model: str, dtype: str, layout: str
) -> dict[str, Any]:
    given = {
        "models": model,
        "dtypes": dtype,
        "requests": options.requests,
        "tokens": options.tokens,
        "batch": options.batch,
        "device": options.device,
        "own": layout,
    }
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in given.items())]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=options.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {options.seconds} seconds"}
    if ended.returncode:
        print(ended.stderr, file=sys.stderr, flush=True)
        return {"failed": ended.stderr.strip().splitlines()[-1:]}
    return json.loads(ended.stdout.splitlines()[-1])


def _answers(options: argparse.Namespace, layout: str) -> dict[str, Any]:
    """Tokens of all requests, and what it took: cold, then from what the caches keep."""
    began = time.perf_counter()
    llm = LLM(
        options.models,
        dtype=options.dtypes,
        device=options.device,
        chunk=64,
        context_len=512,
        max_batch=options.batch,
        prefill_batch=1,
        guard=True,
        **LAYOUTS[layout],
    )
    loaded = time.perf_counter()
    prompts, params = _requests(options)
    first = llm.generate(prompts, params)
    captured = time.perf_counter()
    counters = llm.executor.counters
    rounds = counters.rounds
    again = llm.generate(prompts, params)
    seconds = time.perf_counter() - captured
    return {
        "load_s": round(loaded - began, 2),
        "first_s": round(captured - loaded, 2),
        "rounds": counters.rounds,
        "ms_a_round": round(1e3 * seconds / max(1, counters.rounds - rounds), 3),
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
