# SPDX-License-Identifier: Apache-2.0
"""The depth of a round changes its speed alone: any schedule of depths gives the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.config import AUTO_DEPTHS, EngineConfig
from freewheel.engine.session import Session
from freewheel.errors import ConfigError
from freewheel.host import DepthPolicy
from freewheel.spec import MAX_LAG, StepShape
from tests.program.whitebox import PoisonedEngine, engine, prompts


class RandomDepths(DepthPolicy):
    """Another depth for every round."""

    def __init__(self, seed: int) -> None:
        super().__init__(AUTO_DEPTHS, 3, 4)
        self._rng = random.Random(seed)
        self.chosen: list[int] = []

    def choose(self, load: StepShape, rows: Sequence[str], others: int = 0) -> int:
        self.chosen.append(self._rng.choice(self.depths))
        return self.chosen[-1]


class Stretches(DepthPolicy):
    """Long stretches without drafts, and short ones with some."""

    def __init__(self, seed: int) -> None:
        super().__init__(AUTO_DEPTHS, 3, 4)
        self._rng = random.Random(seed)
        self._left, self._depth = 0, 0

    def choose(self, load: StepShape, rows: Sequence[str], others: int = 0) -> int:
        if not self._left:
            self._depth = self._rng.choice(AUTO_DEPTHS[1:]) if self._depth == 0 else 0
            self._left = self._rng.randint(1, 4 if self._depth else 40)
        self._left -= 1
        return self._depth


class LaggingEngine(PoisonedEngine):
    """Compares rows of which the drafter has read everything; counts those that it had left."""

    def __init__(self, llm: LLM, seed: int) -> None:
        super().__init__(llm, seed, chance=1.0)
        self.longest = 0

    def check_some_row(self) -> None:
        lens = self.llm.executor.arena["drafter.backlog_lens"]
        self.longest = max(self.longest, int(lens.max()))
        state = self.llm.executor.state
        rows = [r for r in self.live_rows() if int(state.computed_lens[r]) and not int(lens[r])]
        if rows and self.rng.random() < 0.6:
            self.check(self.rng.choice(rows))


def use(llm: LLM, policy: DepthPolicy) -> None:
    parts = llm._parts
    parts.policy = policy
    parts.session = Session(parts.new_scheduler, llm.executor)


def erratic(folder: Path, seed: int, **options: Any) -> tuple[LLM, RandomDepths]:
    llm = engine(folder, speculate="auto", **options)
    policy = RandomDepths(seed)
    use(llm, policy)
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


@pytest.mark.parametrize(("name", "run_ahead"), [("t32", 0), ("t32", 3), ("tg", 2), ("t4", 2)])
def test_what_the_drafter_left_for_later_it_reads_as_if_at_once(
    folders: dict[str, Path], name: str, run_ahead: int
) -> None:
    """Its cache rows too are those of a one-shot prefill, in kept pages as well."""
    llm = engine(
        folders[name], speculate="auto", max_batch=3, context_len=128, run_ahead=run_ahead,
        chunk=64, graph="tape",
    )  # fmt: skip
    use(llm, Stretches(run_ahead))
    watched = LaggingEngine(llm, run_ahead)
    params = [
        SamplingParams(temperature=n % 2, seed=n, max_tokens=44, ignore_eos=True) for n in range(4)
    ]
    requests = prompts(seed=9, count=4, longest=40, vocabulary=200)
    plain = engine(folders[name], speculate=0, max_batch=1, prefill_batch=1, context_len=128)
    want = [output.token_ids for output in plain.generate(requests, params)]
    outputs = llm.generate(requests, params)
    assert [output.token_ids for output in outputs] == want
    longer = [[*prompt, *tokens, 7] for prompt, tokens in zip(requests, want, strict=True)]
    again = llm.generate(longer, replace(params[0], max_tokens=20))
    assert sum(output.metrics.cached_tokens for output in again) > 0
    assert watched.checked >= 4
    assert watched.longest == MAX_LAG
    assert {shape.catches_up for shape in llm.executor._lanes} == {False, True}


def test_a_round_without_drafts_leaves_the_drafter_alone(folders: dict[str, Path]) -> None:
    """It makes as many calls as an engine without a drafter, but for those that keep a state."""
    calls: dict[str, int | None] = {}
    for speculate in (0, "auto"):
        llm = engine(folders["t32"], speculate=speculate, graph="tape")
        shape = llm.built.ladder.fit_decode(1, depth=0)
        llm.executor.capture((shape,), lambda _: None)
        calls[str(speculate)] = llm.executor.calls(shape)
    assert calls["0"] is not None and calls["auto"] is not None
    assert calls["0"] < calls["auto"] <= calls["0"] + 10


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
    assert llm._parts.policy is not None and llm._parts.policy._acceptance.expected("new")[1] != 1.8
    known = llm._parts.policy._costs._known
    assert any(one.timed for one in known.values())
    assert all(one.empty for shape, one in known.items() if shape.extras == 0)


@pytest.mark.parametrize("value", ["fast", "3", -1, 8, True, 2.0])
def test_a_wrong_depth_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="speculate"):
        EngineConfig(model="demo", speculate=value)
