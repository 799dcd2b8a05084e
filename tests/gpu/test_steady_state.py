# SPDX-License-Identifier: Apache-2.0
"""Thousands of rounds of mixed traffic: no wait, one letter each way, one launch, nothing late."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from freewheel import LLM, SamplingParams
from freewheel.graph import cuda_waits_are_errors

ROUNDS = 10_000
SYNCS = ("cudaStreamSynchronize", "aten::item", "aten::_local_scalar_dense")


def traffic(llm: LLM, rng: random.Random, requests: int) -> None:
    """Prompts of all lengths, greedy and sampled, filtered or not, ending when they like."""
    prompts = [[rng.randrange(2, 900) for _ in range(rng.randint(1, 90))] for _ in range(requests)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.3]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(1 << 40),
            max_tokens=rng.randint(1, 60),
        )
        for _ in prompts
    ]
    llm.generate(prompts, params)


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = LLM("demo", device="cuda", run_ahead=3, max_batch=8, chunk=64, context_len=512)
    llm.capture()
    return llm


@pytest.mark.slow
def test_ten_thousand_rounds_wait_for_nothing(llm: LLM) -> None:
    rng, counters = random.Random(0), llm.executor.counters
    with cuda_waits_are_errors():
        while counters.rounds < ROUNDS:
            traffic(llm, rng, 64)
    assert counters.late_captures == 0
    assert counters.uploads == counters.downloads == counters.graph_launches == counters.rounds


def test_the_profiler_sees_one_letter_each_way_and_one_launch_a_round(llm: LLM) -> None:
    traffic(llm, random.Random(1), 4)
    torch.cuda.synchronize()
    before = llm.executor.counters.rounds
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as seen:
        traffic(llm, random.Random(2), 12)
        torch.cuda.synchronize()
    rounds = llm.executor.counters.rounds - before
    names = Counter(event.name for event in seen.events() or ())
    copies = {name: count for name, count in names.items() if name.startswith("Memcpy")}
    assert sum(n for name, n in copies.items() if "HtoD" in name) == rounds, copies
    assert sum(n for name, n in copies.items() if "DtoH" in name) == rounds, copies
    assert not any("Pageable" in name for name in copies), copies
    assert names["cudaGraphLaunch"] == rounds
    assert not any(names[name] for name in SYNCS), names
