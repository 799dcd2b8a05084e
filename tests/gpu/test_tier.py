# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory under CUDA graphs: the tokens of a cold engine, and nobody waits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.graph import cuda_waits_are_errors
from tests.fixtures.closed_form import write_checkpoint
from tests.fixtures.compressed import T4, stream_tensors

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CONTEXT = 256


def engine(model: str, page_size: int, **options: Any) -> LLM:
    usual: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_batch": 2,
        "chunk": 64,
        "context_len": CONTEXT,
        "page_size": page_size,
        "speculate": 3,
    }
    return LLM(model, **(usual | options))


@pytest.mark.parametrize("name", ["demo", "stream"])
def test_what_comes_back_from_pinned_memory_gives_the_tokens_of_a_cold_engine(
    tmp_path: Path, name: str
) -> None:
    """Eight prompts in turns on pages for one; then with a bit of every slot turned over."""
    model, page_size = "demo", 64
    if name == "stream":
        small = T4 | {"max_position_embeddings": 512}
        model, page_size = (
            str(write_checkpoint(tmp_path / "m", small, stream_tensors(small, 0))),
            16,
        )
    roomy = engine(model, page_size, prefix_cache=False)
    groups, pages = roomy.built.groups, roomy.built.sizes.pages
    whole = sum(g.page_bytes * (n - 1) for g, n in zip(groups, pages, strict=True))
    latest = sum(
        g.page_bytes * (n - 1)
        for g, n in zip(groups, pages, strict=True)
        if g.retention is not None
    )
    budget = int(0.55 * (whole - latest)) + 2 * latest
    llm = engine(model, page_size, cache_bytes=budget, host_cache_gb=0.2)
    llm.capture()
    rng = random.Random(7)
    prompts = [rng.choices(range(2, 250), k=CONTEXT - 30) for _ in range(8)]
    cold = [roomy.generate([p], GREEDY)[0].token_ids for p in prompts]
    with cuda_waits_are_errors():
        first = [llm.generate([p], GREEDY)[0] for p in prompts]
        again = [llm.generate([p], GREEDY)[0] for p in prompts]
    assert [one.token_ids for one in first] == cold
    assert [one.token_ids for one in again] == cold
    assert sum(one.metrics.cached_host_tokens for one in again) > CONTEXT
    counters, mover = llm.executor.counters, llm.executor.mover
    assert counters.uploads == counters.downloads == counters.rounds
    for slot in range(mover.slots):
        mover.slot(slot)[5] ^= 1
    moves = llm._session.scheduler.copies[0].roster.reservations.moves
    assert moves is not None and moves.counts.damaged == 0
    assert [llm.generate([p], GREEDY)[0].token_ids for p in prompts] == cold
    assert moves.counts.damaged > 0
