# SPDX-License-Identifier: Apache-2.0
"""Everything cached is a function of the certain tokens alone, whatever happened in between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from freewheel import SamplingParams
from tests.program.whitebox import PoisonedEngine, answers, engine, mixed_params, prompts


@pytest.mark.parametrize("family", ["t32", "tg"])
@pytest.mark.parametrize("seed", range(4))
def test_cache_below_computed_equals_a_one_shot_prefill_after_any_schedule(
    folders: dict[str, Path], family: str, seed: int
) -> None:
    rng = random.Random(seed)
    llm = engine(
        folders[family],
        speculate=rng.choice([1, 3, 7]),
        run_ahead=rng.randint(0, 3),
        chunk=rng.choice([9, 16, 33]),
        graph=rng.choice(["eager", "tape"]),
        max_batch=3,
        prefill_batch=2,
        context_len=96,
        cache_bytes=pool_bytes(folders[family], pages=30),
    )
    watched = PoisonedEngine(llm, seed)
    requests = prompts(seed, count=8, longest=50)
    params = [p for p, _ in zip(mixed_params(seed), requests, strict=False)]
    assert len(answers(llm, requests, params)) == len(requests)
    watched.check_some_row()
    assert watched.checked >= 5


def test_preemption_and_aborts_leave_the_neighbours_cache_alone(folders: dict[str, Path]) -> None:
    llm = engine(
        folders["t32"],
        max_batch=3,
        context_len=96,
        cache_bytes=pool_bytes(folders["t32"], pages=28),
    )
    watched = PoisonedEngine(llm, seed=5)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    solo = engine(folders["t32"], context_len=96)
    requests = prompts(11, count=3, longest=30)
    first = llm.stream(requests[0], long)
    next(first)
    first.close()  # aborted with rounds in flight
    assert answers(llm, requests, long) == answers(solo, requests, long)
    assert watched.checked >= 5
    assert watched.preemptions


def pool_bytes(folder: Path, pages: int) -> int:
    """A cache budget of `pages` pages of 4 tokens, in float64."""
    llm = engine(folder, context_len=16, max_batch=1, prefill_batch=1)
    return pages * llm.built.groups[0].page_bytes
