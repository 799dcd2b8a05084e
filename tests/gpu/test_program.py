# SPDX-License-Identifier: Apache-2.0
"""The round as a CUDA graph gives the tokens of the tape on the CPU, however late the host is."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from freewheel import LLM, SamplingParams
from freewheel.graph import cuda_waits_are_errors

PROMPTS = ["a", "the quick brown fox jumps over", "b" * 33, "once"]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_batch": 4,
    "prefill_batch": 2,
    "chunk": 16,
    "page_size": 16,
}


def params(seed: int) -> list[SamplingParams]:
    """One greedy, one sampled, one filtered, one with a minimum."""
    own: dict[str, Any] = {"max_tokens": 20, "seed": seed}
    return [
        SamplingParams(temperature=0, **own),
        SamplingParams(temperature=1.0, **own),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, **own),
        SamplingParams(temperature=1.2, min_tokens=10, **own),
    ]


def run(model: str, device: str, seed: int, **options: Any) -> tuple[list[Any], LLM]:
    llm = LLM(model, device=device, **{**OPTIONS, **options})
    if device == "cuda":
        llm.capture()
    with cuda_waits_are_errors():
        outputs = llm.generate(PROMPTS, params(seed))
    return [(out.token_ids, out.finish_reason) for out in outputs], llm


@cache
def on_the_cpu(model: str, seed: int) -> list[Any]:
    return run(model, "cpu", seed, speculate=0)[0]


@pytest.mark.parametrize(
    ("speculate", "run_ahead"), [(0, 2), (1, 1), (3, 0), (3, 1), (3, 2), (3, 3), (7, 3)]
)
@pytest.mark.parametrize("name", ["t32", "tg"])
def test_tokens_are_those_of_the_tape_whatever_is_drafted_and_however_late(
    folders: dict[str, Path], name: str, speculate: int, run_ahead: int
) -> None:
    model = str(folders[name])
    found, llm = run(model, "cuda", speculate, speculate=speculate, run_ahead=run_ahead)
    assert found == on_the_cpu(model, speculate)
    counters = llm.executor.counters
    assert counters.late_captures == 0
    assert counters.rounds == counters.graph_launches == counters.uploads == counters.downloads


@pytest.mark.parametrize("graph", ["eager", "tape"])
def test_the_other_graphs_run_on_the_device_too(folders: dict[str, Path], graph: str) -> None:
    model = str(folders["t32"])
    assert run(model, "cuda", 3, graph=graph)[0] == on_the_cpu(model, 3)


def test_the_demo_says_on_the_gpu_what_it_says_on_the_cpu() -> None:
    prompts = ["Emma was", "It is a truth universally acknowledged", "The", "When she"]
    greedy = SamplingParams(temperature=0, max_tokens=64)
    seeded = SamplingParams(temperature=0.8, max_tokens=64, seed=5)
    wanted = [greedy, seeded, greedy, seeded]
    both = [
        LLM("demo", device=device, dtype="float32").generate(prompts, wanted)
        for device in ("cpu", "cuda")
    ]
    assert [out.token_ids for out in both[0]] == [out.token_ids for out in both[1]]


def test_bfloat16_answers_and_leaves_no_read(folders: dict[str, Path]) -> None:
    llm = LLM("demo", device="cuda", guard=True, max_batch=2, chunk=64)
    llm.capture()
    with cuda_waits_are_errors():
        out = llm.generate("Emma was", SamplingParams(temperature=0, max_tokens=48))[0]
    assert len(out.token_ids) == 48
    assert llm.executor.sync_log.reads == []
    assert llm.executor.counters.late_captures == 0
    torch.cuda.synchronize()
