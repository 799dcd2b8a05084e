# SPDX-License-Identifier: Apache-2.0
"""A trace through the simulator, and the same requests through an engine of the demo model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.config import EngineConfig
from freewheel.engine import TokenEngine
from freewheel.simulate import Call, Replay, RoundCost, Trace, simulation

BLOCK, CONTEXT = 64, 640
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "speculate": 0,
    "chunk": 128,
    "max_batch": 3,
    "prefill_batch": 1,
    "context_len": CONTEXT,
}
FEW_PAGES = 7_500_000
"""Bytes of no more than what one full context takes, and a few pages."""
A_SECOND = RoundCost(fixed=1.0, per_token=0.0, per_key=0.0)


@dataclass(frozen=True)
class Told:
    """`rounds`: with prompts to read, and all others; `cached`: tokens of prompts."""

    rounds: tuple[int, int]
    cached: int
    preemptions: int


def calls_of(seed: int, longest: int) -> tuple[Call, ...]:
    """Requests that are all there at once; some begin alike."""
    chance, found = random.Random(seed), list[Call]()
    for number in range(9):
        prompt, answer = chance.randrange(20, 400), chance.randrange(2, longest)
        alike = min(chance.randrange(5), prompt // BLOCK)
        own = range(alike, -(-prompt // BLOCK))
        blocks = (*range(alike), *(1000 * (number + 1) + n for n in own))
        found.append(Call(0.0, prompt, answer, blocks))
    return tuple(found)


def simulated(calls: tuple[Call, ...], options: dict[str, Any]) -> Told:
    config = EngineConfig(model="demo", **OPTIONS | options)
    trace = Trace(calls, BLOCK)
    found = Replay(simulation(config, trace, (), A_SECOND), trace).run()
    assert not found.refused
    rounds = (found.prompt_rounds, found.decode_rounds)
    return Told(rounds, found.cached_tokens, found.preemptions)


def tokens_of(call: Call) -> list[int]:
    """Ordinary letters, a block's own."""
    found = list[int]()
    for block in call.blocks:
        chance = random.Random(block)
        found += [chance.randrange(300, 900) for _ in range(BLOCK)]
    return found[: call.prompt]


def answered(calls: tuple[Call, ...], options: dict[str, Any]) -> Told:
    with LLM("demo", graph="eager", **OPTIONS | options) as llm:
        engine = TokenEngine(llm)
        for number, call in enumerate(calls):
            params = SamplingParams(temperature=0, max_tokens=call.answer, ignore_eos=True)
            engine.submit(str(number), tokens_of(call), params)
        cached, rounds = 0, [0, 0]
        while engine.busy:
            cached += sum(step.cached_tokens or 0 for step in engine.step())
            for one in engine.rounds():
                rounds[one.width == 1] += 1
        return Told((rounds[0], rounds[1]), cached, engine.load().preemptions)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_an_engine_takes_the_rounds_and_finds_the_prefixes_that_are_foretold(
    seed: int, run_ahead: int
) -> None:
    calls, options = calls_of(seed, 50), {"run_ahead": run_ahead}
    found = simulated(calls, options)
    assert answered(calls, options) == found and found.cached and not found.preemptions


def test_an_engine_short_of_pages_preempts_as_is_foretold() -> None:
    calls, options = calls_of(1, 200), {"cache_bytes": FEW_PAGES, "max_batch": 6}
    found = simulated(calls, options)
    assert answered(calls, options) == found and found.preemptions
