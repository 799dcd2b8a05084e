# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic for minutes: does memory grow, is every page home, are tokens still right?

    python benchmarks/soak.py --minutes 30

Conversations, lone prompts, cancels, seeds, priorities and tenants on one engine in float64, where
company changes no token, with pages that move to host memory and back. Some prompts come again and
again: their answers must be those of the first minute, which a cold engine gave. Resident memory is
compared with what it was after a fifth of the time. Prints one JSON object; exits 1 if anything is
wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from freewheel import LLM, SamplingParams
from freewheel.engine import TokenEngine
from freewheel.errors import FreewheelError

KNOWN = 12
"""Prompts whose answers are checked whenever they come."""
MOST_LIVE = 24
EVERY_SECONDS = 5.0
"""How often memory is looked at."""


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@dataclass
class Soak:
    """Traffic on one engine, and what has been seen of it."""

    engine: TokenEngine
    vocabulary: int
    context_len: int
    known: dict[int, tuple[list[int], SamplingParams, tuple[int, ...]]]
    rng: random.Random
    live: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    checks: dict[str, int] = field(default_factory=dict[str, int])
    ended: list[list[int]] = field(default_factory=list[list[int]])
    prompts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    seen: Counter[str] = field(default_factory=Counter[str])

    def turn(self, number: int) -> None:
        """Perhaps something arrives or leaves; then a round."""
        if len(self.live) < MOST_LIVE and self.rng.random() < 0.25:
            self.arrive(f"{number}")
        if self.live and self.rng.random() < 0.01:
            name = self.rng.choice(list(self.live))
            self.engine.abort(name)
            self.drop(name)
            self.seen["cancelled"] += 1
        for step in self.engine.step():
            self.live[step.id] += step.tokens
            if step.finish is not None:
                self.end(step.id)

    def arrive(self, name: str) -> None:
        if self.rng.random() < 0.3:
            which = self.rng.randrange(KNOWN)
            prompt, params, _ = self.known[which]
            self.checks[name] = which
        else:
            params = SamplingParams(
                temperature=self.rng.choice([0.0, 0.8]),
                max_tokens=self.rng.randint(1, 60),
                ignore_eos=self.rng.random() < 0.5,
            )
            prompt = self.prompt()
        self.live[name], self.prompts[name] = [], prompt
        self.engine.submit(
            name,
            prompt,
            params,
            self.rng.choice(["", "", "salt"]),
            priority=self.rng.choice([0, 0, -1, 3]),
            tenant=self.rng.choice("abc"),
        )
        self.seen["requests"] += 1

    def prompt(self) -> list[int]:
        """A new one, or the next turn of a conversation."""
        fresh = self.rng.choices(range(300, self.vocabulary), k=self.rng.randint(1, 120))
        if self.ended and self.rng.random() < 0.6:
            return [*self.rng.choice(self.ended), *fresh][: self.context_len - 80]
        return fresh

    def end(self, name: str) -> None:
        output = tuple(self.live[name])
        if name in self.checks:
            self.seen["checked"] += 1
            self.seen["wrong"] += output != self.known[self.checks[name]][2]
        self.ended = [*self.ended[-20:], [*self.prompts[name], *output]]
        self.drop(name)
        self.seen["ended"] += 1
        self.seen["tokens"] += len(output)

    def drop(self, name: str) -> None:
        del self.live[name], self.prompts[name]
        self.checks.pop(name, None)


def known_answers(
    llm: LLM, rng: random.Random
) -> dict[int, tuple[list[int], SamplingParams, tuple[int, ...]]]:
    """Prompts, and what an engine that has seen nothing else answers."""
    found: dict[int, tuple[list[int], SamplingParams, tuple[int, ...]]] = {}
    for number in range(KNOWN):
        prompt = rng.choices(range(300, llm.spec.vocab_size), k=rng.randint(5, 200))
        params = SamplingParams(
            temperature=0.0 if number % 2 else 0.8, seed=number, max_tokens=40, ignore_eos=True
        )
        found[number] = prompt, params, llm.generate([prompt], params)[0].token_ids
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--cache-bytes", type=int, default=64 << 20)
    parser.add_argument("--host-cache-gb", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    cold = LLM(asked.model, dtype="float64", max_batch=1, prefill_batch=1, prefix_cache=False)
    known = known_answers(cold, rng)
    del cold
    llm = LLM(
        asked.model,
        dtype="float64",
        context_len=1024,
        cache_bytes=asked.cache_bytes,
        host_cache_gb=asked.host_cache_gb,
    )
    llm.capture()
    soak = Soak(TokenEngine(llm), llm.spec.vocab_size, llm.context_len, known, rng)
    begun, number, sizes = time.monotonic(), 0, list[tuple[float, int]]()
    while (passed := time.monotonic() - begun) < 60 * asked.minutes:
        soak.turn(number)
        number += 1
        if not sizes or passed >= sizes[-1][0] + EVERY_SECONDS:
            sizes.append((passed, resident_bytes()))
            print(f"{passed:7.0f} s  {dict(soak.seen)}  {sizes[-1][1]:,}", file=sys.stderr)
    for name in list(soak.live):
        soak.engine.abort(name)
    load = soak.engine.load()
    sizes.append((time.monotonic() - begun, resident_bytes()))
    home = all(pool.free + pool.cached == pool.total for pool in (load.rows, *load.pages))
    early = [size for when, size in sizes if when <= max(12 * asked.minutes, sizes[0][0])]
    growth = sizes[-1][1] / max(early) - 1
    figures = {
        "model": asked.model,
        "minutes": asked.minutes,
        "rounds": load.rounds,
        **soak.seen,
        "preemptions": load.preemptions,
        "every_page_home": home,
        "resident_growth": growth,
        "resident_bytes": sizes[-1][1],
        "samples": len(sizes),
    }
    print(json.dumps(figures))
    return 0 if home and growth < 0.02 and not soak.seen["wrong"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FreewheelError as error:
        sys.exit(f"error: {error}")
