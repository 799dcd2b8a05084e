# SPDX-License-Identifier: Apache-2.0
"""What must not change an answer: drafts, company, chunks, caches, graphs, and a late host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freewheel import LLM, SamplingParams
from freewheel.errors import HostSync
from freewheel.models.deepseek_v32 import DeepseekV32
from freewheel.spec import StepPlan
from tests.program.whitebox import PoisonedEngine, answers, engine, prompts, same_bytes

FAMILIES = ["t32", "tg"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, max_tokens=16),
    SamplingParams(temperature=1.2, top_k=30, top_p=0.95, min_p=0.02, seed=3, max_tokens=9),
]
REQUESTS = prompts(seed=1, count=5, longest=45)


@pytest.fixture(scope="module", params=FAMILIES)
def plain(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[Path, list[Any]]:
    """A family's folder, and answers computed alone, eager, without drafts, read at once."""
    folder = folders[request.param]
    llm = engine(folder, speculate=0, graph="eager", run_ahead=0, max_batch=1, prefill_batch=1)
    alone = [[answers(llm, [prompt], params)[0] for prompt in REQUESTS] for params in PARAMS]
    return folder, alone


@pytest.mark.parametrize(
    "options",
    [
        {"speculate": 1},
        {"speculate": 3},
        {"speculate": 7},
        {"speculate": 3, "drafter": "lookup"},
        {"speculate": 3, "graph": "eager"},
        {"speculate": 3, "run_ahead": 0},
        {"speculate": 3, "run_ahead": 3},
        {"speculate": 3, "chunk": 9},
        {"speculate": 3, "chunk": 128},
        {"speculate": 3, "max_batch": 1, "prefill_batch": 1},
        {"speculate": 0, "max_batch": 5, "prefill_batch": 4},
        {"speculate": 2, "page_size": 1},
        {"speculate": 2, "page_size": 64},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_an_answer_does_not_depend_on_how_it_is_computed(
    plain: tuple[Path, list[Any]], options: dict[str, Any]
) -> None:
    folder, alone = plain
    llm = engine(folder, **options)
    for turn, (params, want) in enumerate(zip(PARAMS, alone, strict=True)):
        step = (-1) ** turn  # rows are reused, with other neighbours
        assert answers(llm, REQUESTS[::step], params) == want[::step]


def test_company_in_one_batch_may_mix_every_kind_of_request(plain: tuple[Path, list[Any]]) -> None:
    folder, alone = plain
    llm = engine(folder, max_batch=4)
    watched = PoisonedEngine(llm)
    requests = [prompt for prompt in REQUESTS for _ in PARAMS]
    params = PARAMS * len(REQUESTS)
    want = [alone[index][at] for at in range(len(REQUESTS)) for index in range(len(PARAMS))]
    assert answers(llm, requests, params) == want
    assert watched.checked


def test_different_seeds_give_different_answers(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"])
    seeded = [SamplingParams(temperature=1.0, seed=s, max_tokens=20) for s in range(4)]
    assert len(set(answers(llm, [REQUESTS[0]] * 4, seeded))) == 4


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_any_drafts_are_correct_drafts(folders: dict[str, Path], right: int) -> None:
    """A drafter that is right for exactly `right` of three changes the rounds, not the text."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompt = REQUESTS[0]
    want = answers(engine(folders["t32"], speculate=0), [prompt], params)[0]
    llm = engine(folders["t32"], speculate=3, run_ahead=0, max_batch=1, prefill_batch=1)
    script = [*prompt, *want, *[0] * 8]

    def rewrite(plan: Any) -> None:
        state = llm.executor.state
        for row in plan.rows:
            known = int(state.known_lens[row])
            if known and int(state.draft_lens[row]):
                for ahead in range(int(state.draft_lens[row])):
                    token = script[known + ahead]
                    state.tokens[row, known + ahead] = token if ahead < right else (token + 1) % 256
        launch(plan)

    launch = llm.executor.launch
    llm.executor.launch = rewrite  # type: ignore[method-assign]
    output = llm.generate([prompt], params)[0]
    assert output.token_ids == want
    assert output.metrics.rounds == 1 + -(-29 // (right + 1))


def test_idle_rounds_write_nothing_but_scratch(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"])
    answers(llm, REQUESTS[:3])
    arena = llm.executor.arena
    before = {name: t.clone() for name, t in named(llm).items()}
    shape = llm.built.ladder.decode[-1]
    for round_id in range(3):
        llm.executor.launch(StepPlan(round_id, shape, (), (), (), ()))
        llm.executor.collect()
    for name, tensor in named(llm).items():
        if name.startswith("cache."):
            assert same_bytes(tensor[:, 1:], before[name][:, 1:]), name
        elif name.startswith("state.") and name != "state.page_tables":
            assert torch.equal(tensor, before[name]), name
    assert torch.equal(arena["state.page_tables"], before["state.page_tables"])


def named(llm: LLM) -> dict[str, torch.Tensor]:
    arena = llm.executor.arena
    return {name: arena[name] for name in arena.names()}


def test_pools_are_whole_again_after_every_kind_of_ending(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], max_batch=3)
    for seed in range(6):
        params = [
            SamplingParams(temperature=1.0, seed=seed * 10 + i, max_tokens=1 + 7 * i, stop=("e",))
            for i in range(4)
        ]
        stream = llm.stream(REQUESTS[seed % 5], params[3])
        next(stream)
        stream.close()
        answers(llm, prompts(seed, 4, 20), params)
        reservations = llm._session._scheduler.copies[0].roster.reservations
        reservations.check()
        for pool in (reservations.rows, *reservations.pools):
            assert (pool.owned, pool.quarantined) == (0, 0)


def test_a_host_read_in_the_model_is_refused_at_capture_and_counted_when_eager(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = DeepseekV32.forward

    def reading(self: Any, view: Any, cache: Any) -> Any:
        view.kv_lens.max().item()
        return forward(self, view, cache)

    monkeypatch.setattr(DeepseekV32, "forward", reading)
    with pytest.raises(HostSync, match=r"test_rules\.py"):
        answers(engine(folders["t32"]), [[1, 2, 3]])
    llm = engine(folders["t32"], graph="eager", guard=True)
    answers(llm, [[1, 2, 3]])
    reads = llm.executor.sync_log.reads
    assert reads and all("test_rules.py" in read.file for read in reads)
