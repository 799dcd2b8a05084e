# SPDX-License-Identifier: Apache-2.0
"""Two processes, each with its own requests and half of the experts, answer as one process does."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.engine import TokenEngine
from freewheel.errors import ConfigError, FreewheelError, RankError
from freewheel.runtime.parallel.crew import LocalCrew, assemble, dismiss

PROMPTS = [
    "Emma was",
    "The king spoke to the people, and said that they were free, and that no man should be a slave",
    "Call me",
    "It is a truth universally acknowledged, that",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=10),
    SamplingParams(temperature=0.9, seed=7, max_tokens=10, logprobs=2),
    SamplingParams(temperature=0, max_tokens=5),
    SamplingParams(temperature=0, max_tokens=8, presence_penalty=0.5),
]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "chunk": 32,  # prompts by all-to-all, decoding gathered: see GATHER_TOKENS
    "context_len": 512,
    "max_batch": 1,
    "prefill_batch": 1,
}


@pytest.fixture(scope="module", autouse=True)
def crew() -> object:
    dismiss()  # another file's, of another mesh
    yield
    dismiss()


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("model", ["demo", "demo-v4"])
@pytest.mark.parametrize("depth", [0, 3])
def test_two_copies_with_their_experts_dealt_out_decide_the_tokens_of_one(
    model: str, depth: int
) -> None:
    """More requests than rows, rounds three ahead; cold, then from what the caches keep."""
    alone = answers(LLM(model, **SMALL, speculate=depth))
    options = {"dp": 2, "ep": True, "check_ranks": True, "guard": True, "run_ahead": 3}
    llm = LLM(model, **SMALL, speculate=depth, **options)
    assert answers(llm) == alone
    assert answers(llm) == alone
    assert llm.executor.host_reads() == [0, 0]
    load = TokenEngine(llm).load()
    for pool in (load.rows, *load.pages):
        assert pool.free + pool.cached + pool.owned + pool.quarantined == pool.total


def test_copies_whose_experts_are_cut_decide_the_same_and_an_idle_one_keeps_step() -> None:
    """One request alone: its copy decides, the other replays with nothing to do."""
    params = SamplingParams(temperature=0, max_tokens=12)
    alone = LLM("demo", **SMALL).generate(PROMPTS[1], params)[0]
    llm = LLM("demo", **SMALL, dp=2, check_ranks=True)
    assert llm.generate(PROMPTS[1], params)[0].token_ids == alone.token_ids


def test_each_copy_takes_pages_over_from_its_own_cache() -> None:
    """Prompts that end with a block, cold and twice warm; canaries look at the copied pages."""
    params = SamplingParams(temperature=0, max_tokens=6)
    prompts = [[*range(100, 228)], [*range(300, 364)], [*range(100, 164)]]
    llm = LLM("demo", **SMALL, dp=2, check_ranks=True, guard=True, run_ahead=3, canary="all")
    cold, *warm = [llm.generate(prompts, params) for _ in range(3)]
    for outputs in warm:
        assert [one.token_ids for one in outputs] == [one.token_ids for one in cold]
        assert [one.metrics.cached_tokens for one in outputs] == [127, 63, 63]
    assert not llm.alarm.counts and llm.executor.host_reads() == [0, 0]


def test_a_copy_lost_in_a_round_ends_what_is_under_way_on_all() -> None:
    llm = LLM("demo", **SMALL, dp=2, ep=True)
    streams = [llm.stream(p, SamplingParams(temperature=0, max_tokens=400)) for p in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    crew = assemble("cpu", 1, 2)
    assert isinstance(crew, LocalCrew)
    os.kill(crew.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
        list(streams[0])
    with pytest.raises(FreewheelError, match=r"dropped|rank 1"):
        list(streams[1])


def test_what_copies_cannot_share_is_refused_before_any_is_started() -> None:
    dismiss()
    with pytest.raises(ConfigError, match="5 ranks cannot share"):
        LLM("demo", **SMALL, dp=5, ep=True)
    with pytest.raises(ConfigError, match="dp: must be between 1"):
        LLM("demo", **SMALL, dp=0)
