# SPDX-License-Identifier: Apache-2.0
"""What choosing the draft depth round by round costs and gains, against every fixed depth.

    OMP_NUM_THREADS=1 PYTHONPATH=src:. python benchmarks/bench_depth.py [--repeats N] [--json]

The engine that chooses also runs with each depth fixed: the same graphs, the same drafter. "none"
is an engine without a drafter, which has nothing to keep current. They take turns, piece by piece
of each trace, so that a machine with other work to do slows all alike.
Tokens must be the same everywhere. On a CPU, seconds are the process's own (`time.process_time`),
on one thread: they do not count what others took from the machine. On CUDA they are the wall's.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel import LLM, SamplingParams
from freewheel.config import AUTO_DEPTHS
from freewheel.host import DepthPolicy
from freewheel.spec import StepShape

PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text("utf-8"))
BATCH = 8


@dataclass(frozen=True)
class Piece:
    """Requests that run together, so many at a time."""

    prompts: tuple[str, ...]
    params: tuple[SamplingParams, ...]
    at_once: int


def piece(kinds: str, count: int, at_once: int, tokens: int, warm: float, seed: int) -> Piece:
    """`count` requests of `kinds` in turn. `warm`: temperature of every second one."""
    rng = random.Random(seed)
    texts: list[str] = []
    params: list[SamplingParams] = []
    for index in range(count):
        kind = kinds.split()[index % len(kinds.split())]
        texts.append(rng.choice([one["prompt"] for one in PROMPTS if one["kind"] == kind]))
        heat = warm if index % 2 else 0.0
        wish = SamplingParams(temperature=heat, seed=index, max_tokens=tokens, ignore_eos=True)
        params.append(wish)
    return Piece(tuple(texts), tuple(params), at_once)


def traces(tokens: int) -> dict[str, list[Piece]]:
    """Pieces by the name of their trace."""
    alone = {
        kind: [piece(kind, 2, 1, tokens, 0.8, n) for n in range(2)]
        for kind in ("prose", "copy", "json")
    }
    return alone | {
        "hot prose": [piece("prose", 2, 1, tokens, 1.5, n) for n in range(2)],
        "mixed of 4": [piece("prose copy json", 6, 4, tokens, 0.8, n) for n in range(2)],
        "prose of 8": [piece("prose", 8, 8, tokens, 0.8, n) for n in range(2)],
        "changing load": [
            piece("prose json copy", count, count, tokens // 2, 1.0, n)
            for n, count in enumerate((1, 8, 2, 6, 1, 4))
        ],
    }


class FixedDepth(DepthPolicy):
    """One depth for all rounds, among the graphs of an engine that could choose."""

    def choose(self, load: StepShape, rows: Sequence[str], others: int = 0) -> int:
        del load, rows, others
        return self._start


def engine(depth: int | str) -> LLM:
    llm = LLM(
        "demo", speculate=depth, max_batch=BATCH, prefill_batch=1, context_len=512, chunk=64,
        prefix_cache=False,
    )  # fmt: skip
    llm.capture()
    return llm


def use(llm: LLM, policy: DepthPolicy | None) -> None:
    """Have `policy` choose from here on."""
    llm._policy = policy
    llm._session = type(llm._session)(llm._new_scheduler, llm.executor)


def measured(llm: LLM, one: Piece) -> tuple[float, float, list[tuple[int, ...]]]:
    """(CPU seconds, wall seconds, tokens) of a piece."""
    cpu, wall = time.process_time(), time.perf_counter()
    outputs = llm.generate(list(one.prompts), list(one.params), at_once=one.at_once)
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    return *seconds, [output.token_ids for output in outputs]


def run(repeats: int, tokens: int, depths: tuple[int | str, ...]) -> Iterator[dict[str, Any]]:
    """One row for each trace."""
    plain, chooser = engine(0), engine("auto")
    policies = {
        depth: chooser._policy if depth == "auto" else FixedDepth(AUTO_DEPTHS, int(depth), 4)
        for depth in depths
        if depth != "none"
    }
    for name, pieces in traces(tokens).items():
        cpu, wall = dict.fromkeys(depths, 0.0), dict.fromkeys(depths, 0.0)
        count = differing = 0
        for _ in range(repeats):
            for one in pieces:
                first: list[tuple[int, ...]] | None = None
                for depth in depths:
                    llm = plain if depth == "none" else chooser
                    use(llm, policies.get(depth))
                    own, all_of_it, answers = measured(llm, one)
                    cpu[depth] += own
                    wall[depth] += all_of_it
                    first = first or answers
                    differing += answers != first
                count += sum(map(len, first or ()))
        timed = wall if chooser.built.resolved.device == "cuda" else cpu
        rate = {str(depth): count / seconds for depth, seconds in timed.items()}
        fixed = {depth: rate[str(depth)] for depth in depths if isinstance(depth, int)}
        best = max(fixed, key=lambda depth: fixed[depth])
        yield {
            "trace": name, "tokens": count, "differing_pieces": differing, "best_fixed": best,
            "rate": rate,
            "tokens_per_second": {str(d): count / seconds for d, seconds in wall.items()},
            "auto_against_best": rate["auto"] / fixed[best],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    depths = ("none", *AUTO_DEPTHS, "auto")
    if not args.json:
        print(f"{'trace':>14} " + " ".join(f"{depth!s:>6}" for depth in depths) + "   auto/best")
    for row in run(args.repeats, args.tokens, depths):
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        rates = " ".join(f"{row['rate'][str(d)]:6.0f}" for d in depths)
        print(
            f"{row['trace']:>14} {rates}   {row['auto_against_best']:.3f} of {row['best_fixed']}"
            + (f"  {row['differing_pieces']} pieces differ" if row["differing_pieces"] else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
