# SPDX-License-Identifier: Apache-2.0
r"""What choosing the draft depth round by round costs and gains, against every fixed depth.

    OMP_NUM_THREADS=1 PYTHONPATH=src:. python benchmarks/bench_depth.py \
        [--repeats N] [--dtype float32] [--json]

The engine that chooses also runs with each depth fixed: the same graphs, the same drafter. "none"
is an engine without a drafter, which has nothing to keep current. They take turns, piece by piece
of each trace, so that a machine with other work to do slows all alike. Every repeat has other
requests. Tokens must be the same everywhere, but for rounding where rounds of other shapes round
otherwise.

On a CPU, seconds are the process's own (`time.process_time`), on one thread: they do not count what
others took from the machine. On CUDA they are the wall's. "host" is what the one thread that
launches rounds works for each of them, and "waits" how long it then waits for a letter.
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
from freewheel.engine.session import Session
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
        wish = SamplingParams(
            temperature=heat, seed=97 * seed + index, max_tokens=tokens, ignore_eos=True
        )
        params.append(wish)
    return Piece(tuple(texts), tuple(params), at_once)


def traces(tokens: int, turn: int = 0) -> dict[str, list[Piece]]:
    """Pieces by the name of their trace; those of another `turn` have other requests."""
    two = (2 * turn, 2 * turn + 1)
    alone = {
        kind: [piece(kind, 2, 1, tokens, 0.8, n) for n in two] for kind in ("prose", "copy", "json")
    }
    return alone | {
        "hot prose": [piece("prose", 2, 1, tokens, 1.5, n) for n in two],
        "mixed of 4": [piece("prose copy json", 6, 4, tokens, 0.8, n) for n in two],
        "prose of 8": [piece("prose", 8, 8, tokens, 0.8, n) for n in two],
        "changing load": [
            piece("prose json copy", count, count, tokens // 2, 1.0, 6 * turn + n)
            for n, count in enumerate((1, 8, 2, 6, 1, 4))
        ],
    }


class FixedDepth(DepthPolicy):
    """One depth for all rounds, among the graphs of an engine that could choose: nothing is counted
    and nothing timed."""

    def choose(self, load: StepShape, rows: Sequence[str], others: int = 0) -> int:
        del load, rows, others
        return self._start

    def listens(self, round_id: int) -> bool:
        del round_id
        return False

    def count(self, row: str, offered: int, agreed: int, left: int) -> None:
        pass

    def took(self, shape: StepShape, seconds: float, host: float = 0.0) -> None:
        pass

    def forget(self, row: str) -> None:
        pass


@dataclass
class Spent:
    """On all pieces of a trace so far, in seconds; `works` and `waits`: of the rounds whose times
    were kept."""

    cpu: float = 0.0
    wall: float = 0.0
    rounds: int = 0
    works: float = 0.0
    waits: float = 0.0


def engine(depth: int | str, dtype: str) -> LLM:
    llm = LLM(
        "demo", speculate=depth, max_batch=BATCH, prefill_batch=1, context_len=512, chunk=64,
        prefix_cache=False, dtype=dtype,
    )  # fmt: skip
    llm.capture()
    return llm


def use(llm: LLM, policy: DepthPolicy | None) -> None:
    """Have `policy` choose from here on."""
    parts = llm._parts
    parts.policy = policy
    parts.session = Session(parts.new_scheduler, llm.executor)


def measured(llm: LLM, one: Piece, spent: Spent) -> list[tuple[int, ...]]:
    """Tokens of a piece; what it took is added to `spent`."""
    cpu, wall = time.process_time(), time.perf_counter()
    outputs = llm.generate(list(one.prompts), list(one.params), at_once=one.at_once)
    spent.cpu += time.process_time() - cpu
    spent.wall += time.perf_counter() - wall
    for times in llm._session.timeline.take():
        spent.rounds += 1
        spent.works += times.launched - times.begun + times.delivered - times.arrived
        spent.waits += times.arrived - times.asked
    return [output.token_ids for output in outputs]


def compared(
    name: str, each: Sequence[Piece], engines: dict[int | str, tuple[LLM, DepthPolicy | None]]
) -> dict[str, Any]:
    """One trace under each of the engines, which take turns."""
    spent = {depth: Spent() for depth in engines}
    count = differing = 0
    for one in each:
        first: list[tuple[int, ...]] | None = None
        for depth, (llm, policy) in engines.items():
            use(llm, policy)
            answers = measured(llm, one, spent[depth])
            first = first or answers
            differing += answers != first
        count += sum(map(len, first or ()))
    cuda = engines["auto"][0].built.resolved.device == "cuda"
    rate = {str(d): count / (of.wall if cuda else of.cpu) for d, of in spent.items()}
    fixed = {depth: rate[str(depth)] for depth in engines if isinstance(depth, int)}
    best = max(fixed, key=lambda depth: fixed[depth])
    return {
        "trace": name, "tokens": count, "differing_pieces": differing, "best_fixed": best,
        "rate": rate,
        "tokens_per_second": {str(d): count / of.wall for d, of in spent.items()},
        "host_us": {str(d): 1e6 * of.works / of.rounds for d, of in spent.items()},
        "waits_us": {str(d): 1e6 * of.waits / of.rounds for d, of in spent.items()},
        "auto_against_best": rate["auto"] / fixed[best],
    }  # fmt: skip


def run(repeats: int, tokens: int, dtype: str = "auto") -> Iterator[dict[str, Any]]:
    """One row for each trace."""
    engines = every_engine(dtype)
    turns = [traces(tokens, turn) for turn in range(repeats)]
    for name in turns[0]:
        yield compared(name, [one for turn in turns for one in turn[name]], engines)


def every_engine(dtype: str = "auto") -> dict[int | str, tuple[LLM, DepthPolicy | None]]:
    """By how it drafts: without a drafter, at each depth, and as its policy chooses."""
    plain, chooser = engine(0, dtype), engine("auto", dtype)
    engines: dict[int | str, tuple[LLM, DepthPolicy | None]] = {"none": (plain, None)}
    engines |= {d: (chooser, FixedDepth(AUTO_DEPTHS, d, 4)) for d in AUTO_DEPTHS}
    engines["auto"] = chooser, chooser._parts.policy
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--dtype", default="auto", help="float32: the same tokens at every depth")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    depths = ("none", *AUTO_DEPTHS, "auto")
    if not args.json:
        print(f"{'trace':>14} " + " ".join(f"{depth!s:>6}" for depth in depths) + "   auto/best")
    for row in run(args.repeats, args.tokens, args.dtype):
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        rates = " ".join(f"{row['rate'][str(d)]:6.0f}" for d in depths)
        print(
            f"{row['trace']:>14} {rates}   {row['auto_against_best']:.3f} of {row['best_fixed']}"
            + (f"  {row['differing_pieces']} pieces differ" if row["differing_pieces"] else "")
            + f"  host {row['host_us'][str(row['best_fixed'])]:.0f} -> {row['host_us']['auto']:.0f}"
            + f" us, waits {row['waits_us']['auto']:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
