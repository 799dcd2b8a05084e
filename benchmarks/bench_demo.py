# SPDX-License-Identifier: Apache-2.0
"""How fast the shipped model answers on this machine's CPU.

    OMP_NUM_THREADS=1 python benchmarks/bench_demo.py [--json]

Each row is a fresh process, so that start-up counts: seconds to import torch, from there to the
first token, and tokens a second afterwards, by draft depth and graph.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

CHILD = """
import json, sys, time
start = time.perf_counter()
import torch
imported = time.perf_counter()
from freewheel import LLM, SamplingParams
depth, graph = int(sys.argv[1]), sys.argv[2]
llm = LLM("demo", speculate=depth, graph=graph, max_batch=1, prefill_batch=1)
params = SamplingParams(temperature=0, max_tokens=192, ignore_eos=True)
stream = llm.stream("Emma was", params)
next(stream)
first = time.perf_counter()
*_, last = stream
rest = last.metrics.completion_tokens - 1
print(json.dumps({
    "import_torch": imported - start,
    "first_token": first - imported,
    "tokens_per_second": rest / (last.metrics.total_seconds - last.metrics.first_token_seconds),
    "tokens_per_round": last.metrics.tokens_per_round,
}))
"""


def run(depth: int, graph: str) -> dict[str, Any]:
    """One fresh process."""
    command = [sys.executable, "-c", CHILD, str(depth), graph]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for depth in (0, 1, 3, 5, 7):
        for graph in ("eager", "tape"):
            runs = [run(depth, graph) for _ in range(args.repeats)]
            best = {key: sorted(r[key] for r in runs)[len(runs) // 2] for key in runs[0]}
            rows.append({"drafts": depth, "graph": graph, **best})
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'drafts':>6} {'graph':>6} {'import':>8} {'first':>8} {'tok/s':>8} {'tok/round':>10}")
    for r in rows:
        print(
            f"{r['drafts']:6} {r['graph']:>6} {r['import_torch']:7.2f}s {r['first_token']:7.2f}s "
            f"{r['tokens_per_second']:8.0f} {r['tokens_per_round']:10.2f}"
        )


if __name__ == "__main__":
    main()
