# SPDX-License-Identifier: Apache-2.0
"""More than two processes: cut layers within copies, and experts over all of them."""

from __future__ import annotations

from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.runtime.parallel.crew import dismiss

PROMPTS = ["Emma was", "The king spoke to the people, and said that they", "Call me"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.9, seed=7, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=6),
]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "chunk": 32,
    "context_len": 512,
    "max_batch": 2,
}


@pytest.fixture(autouse=True)
def crew() -> object:
    dismiss()
    yield
    dismiss()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("demo", {"tp": 2, "dp": 2, "ep": True, "split_scan": 512}),
        ("demo", {"tp": 4, "split_scan": 512}),
        ("demo", {"dp": 4, "ep": True}),
        ("demo-v4", {"dp": 3, "ep": True}),
        ("demo-v4", {"tp": 2, "dp": 2}),
    ],
)
@pytest.mark.parametrize("depth", [0, 3])
def test_several_processes_decide_the_tokens_of_one(
    model: str, mesh: dict[str, Any], depth: int
) -> None:
    alone = LLM(model, **SMALL, speculate=depth).generate(PROMPTS, PARAMS)
    llm = LLM(model, **SMALL, speculate=depth, check_ranks=True, guard=True, **mesh)
    found = llm.generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    ranks = mesh.get("tp", 1) * mesh.get("dp", 1)
    assert llm.executor.host_reads() == [0] * ranks
