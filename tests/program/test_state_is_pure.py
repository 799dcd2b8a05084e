# SPDX-License-Identifier: Apache-2.0
"""Everything cached is a function of the certain tokens alone, whatever happened in between."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from freewheel import SamplingParams
from tests.program.whitebox import PoisonedEngine, answers, engine, mixed_params, prompts


@pytest.mark.parametrize("family", ["t32", "tg", "t4"])
@pytest.mark.parametrize("seed", range(4))
def test_cache_below_computed_equals_a_one_shot_prefill_after_any_schedule(
    folders: dict[str, Path], family: str, seed: int
) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "speculate": rng.choice([1, 3, 7]),
        "run_ahead": rng.randint(0, 3),
        "chunk": rng.choice([9, 16, 33]),
        "graph": rng.choice(["eager", "tape"]),
        "max_batch": 3,
        "prefill_batch": 2,
        "context_len": 96,
        "prefix_cache": rng.random() < 0.5,  # without it, what a group forgets is poisoned too
    }
    llm = engine(
        folders[family], cache_bytes=pool_bytes(folders[family], 30 / 72, options), **options
    )
    watched = PoisonedEngine(llm, seed)
    requests = prompts(seed, count=8, longest=50)
    params = [p for p, _ in zip(mixed_params(seed), requests, strict=False)]
    assert len(answers(llm, requests, params)) == len(requests)
    watched.check_some_row()
    assert watched.checked >= 5


@pytest.mark.parametrize("family", ["t32", "t4"])
def test_preemption_and_aborts_leave_the_neighbours_cache_alone(
    folders: dict[str, Path], family: str
) -> None:
    options: dict[str, Any] = {"max_batch": 3, "context_len": 96}
    cache_bytes = pool_bytes(folders[family], 28 / 72, options)
    llm = engine(folders[family], cache_bytes=cache_bytes, **options)
    watched = PoisonedEngine(llm, seed=5)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    solo = engine(folders[family], context_len=96)
    requests = prompts(11, count=3, longest=30)
    first = llm.stream(requests[0], long)
    next(first)
    first.close()  # aborted with rounds in flight
    assert answers(llm, requests, long) == answers(solo, requests, long)
    assert watched.checked >= 5
    assert watched.preemptions


def pool_bytes(folder: Path, share: float, options: dict[str, Any]) -> int:
    """A cache budget for that share of a full engine's contexts, and all of the latest tokens.

    A fifth of what the latest tokens leave goes to those that kept prompts are started from.
    """
    built = engine(folder, **(options | {"prefix_cache": False})).built
    latest = any(group.retention is not None for group in built.groups)
    latest = latest and options.get("prefix_cache", True)
    sizes = [
        (pages - 1) * group.page_bytes * (share * (1.25 if latest else 1) if keeps else 1)
        for group, pages in zip(built.groups, built.sizes.pages, strict=True)
        for keeps in [group.retention is None]
    ]
    return math.ceil(sum(sizes)) + 1
