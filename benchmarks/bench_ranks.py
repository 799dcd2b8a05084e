# SPDX-License-Identifier: Apache-2.0
"""Do two cards decide what one does? `python benchmarks/bench_ranks.py [--models demo,demo-v4]`.

Prints, for each model and dtype, whether tokens of one and of two ranks agree, host reads that the
guard counted, and rounds a second. Needs two CUDA devices.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from freewheel import LLM, SamplingParams

PROMPTS = ["Emma was", "The king spoke to the people, and said that they", "Call me", "To be or"]
PARAMS = [SamplingParams(temperature=0, max_tokens=48)] * 3 + [
    SamplingParams(temperature=0.8, seed=11, max_tokens=48)
]


def main() -> None:
    options = _options()
    for model in options.models.split(","):
        for dtype in options.dtypes.split(","):
            own: dict[str, Any] = {
                "dtype": dtype,
                "device": options.device,
                "chunk": 64,
                "context_len": 512,
                "max_batch": options.batch,
                "prefill_batch": 1,
                "guard": True,
            }
            alone, first = _answers(model, 1, own)
            several, second = _answers(model, options.ranks, own)
            same = [a == b for a, b in zip(alone, several, strict=True)]
            line = {"model": model, "dtype": dtype, "same": same, "one": first, "ranks": second}
            print(json.dumps(line), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare one rank with several.")
    parser.add_argument("--models", default="demo,demo-v4")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def _answers(model: str, ranks: int, own: dict[str, Any]) -> tuple[list[Any], dict[str, object]]:
    began = time.perf_counter()
    llm = LLM(model, tp=ranks, **own)
    loaded = time.perf_counter()
    first = llm.generate(PROMPTS, PARAMS)
    captured = time.perf_counter()
    counters = llm.executor.counters
    rounds, reads = counters.rounds, len(llm.executor.sync_log.reads)
    again = llm.generate(PROMPTS, PARAMS)
    seconds = time.perf_counter() - captured
    figures = {
        "load_s": round(loaded - began, 2),
        "first_s": round(captured - loaded, 2),
        "ms_a_round": round(1e3 * seconds / max(1, counters.rounds - rounds), 3),
        "host_reads": len(llm.executor.sync_log.reads) - reads,
        "copies": [copy.op for copy in llm.executor.sync_log.copies][:3],
        "repeats": [one.token_ids for one in first] == [one.token_ids for one in again],
    }
    return [one.token_ids for one in first], figures


if __name__ == "__main__":
    main()
