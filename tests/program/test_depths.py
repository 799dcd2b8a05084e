# SPDX-License-Identifier: Apache-2.0
"""The depth of a round changes its speed alone: any schedule of depths gives the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.config import AUTO_DEPTHS, EngineConfig
from freewheel.errors import ConfigError
from freewheel.host import DepthPolicy
from freewheel.spec import StepShape
from tests.program.whitebox import engine, prompts


class RandomDepths(DepthPolicy):
    """Another depth for every round."""

    def __init__(self, seed: int) -> None:
        super().__init__(AUTO_DEPTHS, 3, 4)
        self._rng = random.Random(seed)
        self.chosen: list[int] = []

    def choose(self, load: StepShape, rows: Sequence[str], others: int = 0) -> int:
        self.chosen.append(self._rng.choice(self.depths))
        return self.chosen[-1]


def erratic(folder: Path, seed: int, **options: Any) -> tuple[LLM, RandomDepths]:
    llm = engine(folder, speculate="auto", **options)
    policy = llm._policy = RandomDepths(seed)
    llm._session = type(llm._session)(llm._new_scheduler, llm.executor)
    return llm, policy


def wishes(seed: int) -> list[SamplingParams]:
    """Greedy and seeded, penalties, biases, scores, forms on the device and on the host."""
    warm: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 24}
    return [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(**warm, ignore_eos=True),
        SamplingParams(**warm, presence_penalty=1.0, frequency_penalty=0.5, logprobs=2),
        SamplingParams(**warm, repetition_penalty=1.4, logit_bias={7: 3.0}, min_tokens=4),
        SamplingParams(**warm, regex="([a-f]{3}[0-9] ){2,5}"),
        SamplingParams(**warm, bad_words=("a", "bc"), top_k=30, top_p=0.9, min_p=0.01),
        SamplingParams(**warm, thinking_token_budget=3, choice=("yes", "no")),
    ]


@pytest.mark.parametrize("drafter", ["mtp", "lookup"])
@pytest.mark.parametrize(("seed", "run_ahead", "batch"), [(1, 0, 3), (2, 2, 8), (3, 3, 2)])
def test_any_schedule_of_depths_gives_the_same_tokens(
    folders: dict[str, Path], drafter: str, seed: int, run_ahead: int, batch: int
) -> None:
    params = wishes(seed)
    requests = [*prompts(seed, len(params) - 1, 20), [5, 261, 9]]
    plain = engine(folders["t32"], speculate=0, max_batch=1, prefill_batch=1, run_ahead=0)
    want = plain.generate(requests, params)
    llm, policy = erratic(
        folders["t32"], seed, run_ahead=run_ahead, max_batch=batch, drafter=drafter
    )
    outputs = llm.generate(requests, params)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in want]
    assert outputs[2].logprobs is not None and want[2].logprobs is not None
    assert [one.token_id for one in outputs[2].logprobs] == [
        one.token_id for one in want[2].logprobs
    ]
    assert len(set(policy.chosen)) == len(AUTO_DEPTHS)
    assert all(0 <= one.metrics.accepted <= one.metrics.drafted for one in outputs)


@pytest.mark.parametrize("name", ["tg", "t4"])
def test_other_families_and_few_pages_bear_any_schedule(
    folders: dict[str, Path], name: str
) -> None:
    """V4's window and tails are freed behind rows whose rounds differ in width."""
    params = [
        SamplingParams(temperature=n % 2, seed=n, max_tokens=40, ignore_eos=True) for n in range(4)
    ]
    requests = prompts(seed=8, count=4, longest=30, vocabulary=200)
    plain = engine(folders[name], speculate=0, max_batch=1, prefill_batch=1, run_ahead=0)
    want = [output.token_ids for output in plain.generate(requests, params)]
    llm, policy = erratic(folders[name], 5, max_batch=4, context_len=96)
    assert [output.token_ids for output in llm.generate(requests, params)] == want
    assert len(set(policy.chosen)) == len(AUTO_DEPTHS)


def test_rows_of_one_token_pages_have_room_in_every_letter(folders: dict[str, Path]) -> None:
    """A shallow round may have to write the pages that a deep one before it made needful."""
    llm, _ = erratic(folders["t32"], 4, page_size=1, max_batch=2, run_ahead=3)
    want = engine(folders["t32"], speculate=0, max_batch=2).generate([[1, 2], [3]])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = engine(folders["t32"], speculate=0, max_batch=2)
    want = [output.token_ids for output in plain.generate([[1, 2], [3]], params)]
    assert [output.token_ids for output in llm.generate([[1, 2], [3]], params)] == want


def test_auto_speaks_the_same_and_learns_between_requests(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], speculate="auto", max_batch=2)
    llm.capture()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    want = engine(folders["t32"], speculate=0).generate([[1, 2], [3]], params)
    for _ in range(2):
        outputs = llm.generate([[1, 2], [3]], params)
        assert [one.token_ids for one in outputs] == [one.token_ids for one in want]
    assert llm._policy is not None and llm._policy._all.rounds > 0
    assert any(known.times for known in llm._policy._known.values())
    assert all(known.empty for shape, known in llm._policy._known.items() if shape.extras == 0)


@pytest.mark.parametrize("value", ["fast", "3", -1, 8, True, 2.0])
def test_a_wrong_depth_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="speculate"):
        EngineConfig(model="demo", speculate=value)
