# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's round as a CUDA graph gives the tokens of the tape on the CPU, however late."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from freewheel import LLM, SamplingParams
from freewheel.graph import cuda_waits_are_errors
from freewheel.spec import StepPlan
from tests.fixtures.closed_form import write_checkpoint
from tests.fixtures.compressed import PUBLISHED_RATIOS, T4, stream_tensors
from tests.gpu.test_steady_state import SYNCS

LONG = 310
"""Tokens an answer: windows of 4 and of 128 close at every offset of a rectangle."""

PROMPTS = [[17, 200, 3], list(range(40, 75)), [9] * 128, [250, 31, 7, 7, 90]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_batch": 4,
    "prefill_batch": 2,
    "chunk": 16,
    "page_size": 128,
}


def params() -> list[SamplingParams]:
    """Two greedy, one sampled, one filtered."""
    own: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True, "seed": 5}
    return [
        SamplingParams(temperature=0, **own),
        SamplingParams(temperature=1.0, **own),
        SamplingParams(temperature=0, **own),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, **own),
    ]


@pytest.fixture(scope="session")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Ratios 4 and 8 and a window of 8; and the published ratios and window."""
    root = tmp_path_factory.mktemp("streams")
    small = T4 | {"max_position_embeddings": 512}
    return {
        "small": write_checkpoint(root / "small", small, stream_tensors(small, 0)),
        "published": write_checkpoint(
            root / "published", PUBLISHED_RATIOS, stream_tensors(PUBLISHED_RATIOS, 3)
        ),
    }


def run(model: str, device: str, **options: Any) -> tuple[list[Any], LLM]:
    llm = LLM(model, device=device, **{**OPTIONS, **options})
    if device == "cuda":
        llm.capture()
    with cuda_waits_are_errors():
        outputs = llm.generate(PROMPTS, params())
    return [out.token_ids for out in outputs], llm


@cache
def on_the_cpu(model: str) -> list[Any]:
    return run(model, "cpu", speculate=0)[0]


@pytest.mark.parametrize(
    ("speculate", "run_ahead"), [(0, 2), (1, 1), (3, 0), (3, 1), (3, 2), (3, 3), (7, 3)]
)
@pytest.mark.parametrize("name", ["small", "published"])
def test_tokens_are_those_of_the_tape_whatever_is_drafted_and_however_late(
    streams: dict[str, Path], name: str, speculate: int, run_ahead: int
) -> None:
    model = str(streams[name])
    found, llm = run(model, "cuda", speculate=speculate, run_ahead=run_ahead)
    assert all(len(tokens) == LONG for tokens in found)
    assert found == on_the_cpu(model)
    counters = llm.executor.counters
    assert counters.late_captures == 0
    assert counters.rounds == counters.graph_launches == counters.uploads == counters.downloads


@pytest.mark.parametrize("name", ["small", "published"])
def test_nothing_undefined_reaches_a_token(streams: dict[str, Path], name: str) -> None:
    """All caches start as NaN, and scratch pages are NaN again before every round."""
    model = str(streams[name])
    llm = LLM(model, device="cuda", **{**OPTIONS, "speculate": 3, "run_ahead": 0})
    llm.capture()
    arena, launch = llm.executor.arena, llm.executor.launch
    caches = [arena[name] for name in arena.names() if name.startswith("cache.")]
    for tensor in caches:
        tensor.fill_(torch.nan)

    def poison(plan: StepPlan) -> None:
        torch.cuda.synchronize()
        for tensor in caches:
            tensor[:, 0] = torch.nan
        torch.cuda.synchronize()
        launch(plan)

    llm.executor.launch = poison  # type: ignore[method-assign]
    outputs = llm.generate(PROMPTS, params())
    assert [out.token_ids for out in outputs] == on_the_cpu(model)


def traffic(llm: LLM, rng: random.Random, requests: int) -> None:
    """Prompts of all lengths, greedy and sampled, ending when they like."""
    prompts = [[rng.randrange(2, 250) for _ in range(rng.randint(1, 150))] for _ in range(requests)]
    llm.generate(
        prompts,
        [
            SamplingParams(
                temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(1 << 40),
                top_p=rng.choice([1.0, 0.9]), max_tokens=rng.randint(1, 150),
            )
            for _ in prompts
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(streams: dict[str, Path]) -> LLM:
    """In bfloat16."""
    options: dict[str, Any] = {"max_batch": 8, "chunk": 64, "page_size": 128, "run_ahead": 3}
    llm = LLM(str(streams["published"]), device="cuda", speculate=3, **options)
    llm.capture()
    return llm


def test_two_thousand_rounds_of_mixed_traffic_wait_for_nothing(llm: LLM) -> None:
    rng, counters = random.Random(0), llm.executor.counters
    with cuda_waits_are_errors():
        while counters.rounds < 2000:
            traffic(llm, rng, 48)
    assert counters.late_captures == 0
    assert counters.uploads == counters.downloads == counters.graph_launches == counters.rounds


def test_the_profiler_sees_one_letter_each_way_and_one_launch_a_round(llm: LLM) -> None:
    traffic(llm, random.Random(1), 4)
    torch.cuda.synchronize()
    before = llm.executor.counters.rounds
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        traffic(llm, random.Random(2), 8)
        torch.cuda.synchronize()
    rounds = llm.executor.counters.rounds - before
    names = Counter(event.name for event in seen.events() or ())
    copies = {name: count for name, count in names.items() if name.startswith("Memcpy")}
    assert sum(n for name, n in copies.items() if "HtoD" in name) == rounds, copies
    assert sum(n for name, n in copies.items() if "DtoH" in name) == rounds, copies
    assert not any("Pageable" in name for name in copies), copies
    assert names["cudaGraphLaunch"] == rounds
    assert not any(names[name] for name in SYNCS), names
