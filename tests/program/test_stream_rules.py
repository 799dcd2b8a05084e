# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: what must not change an answer, with drafts and every kind of cached state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.audit import audit
from freewheel.config import EngineConfig
from freewheel.errors import ConfigError, HostSync
from freewheel.models.deepseek_v4 import DeepseekV4
from freewheel.runtime import survey
from freewheel.spec import StepPlan
from tests.fixtures.closed_form import write_checkpoint
from tests.fixtures.compressed import PUBLISHED_RATIOS, stream_tensors
from tests.program.whitebox import (
    PoisonedEngine,
    ScriptedDrafts,
    answers,
    engine,
    prompts,
    same_bytes,
)

PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, max_tokens=16),
]
REQUESTS = prompts(seed=1, count=5, longest=45)
SOLO = {"run_ahead": 0, "max_batch": 1, "prefill_batch": 1}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> list[Any]:
    """Answers computed alone, eager, without drafts, read at once."""
    llm = engine(folders["t4"], speculate=0, graph="eager", **SOLO)
    return [[answers(llm, [prompt], params)[0] for prompt in REQUESTS] for params in PARAMS]


@pytest.mark.parametrize(
    "options",
    [
        {"speculate": 1},
        {"speculate": 7, "run_ahead": 3},
        {"speculate": 3, "drafter": "lookup"},
        {"speculate": 3, "graph": "eager", "run_ahead": 0},
        {"speculate": 3, "chunk": 9},
        {"speculate": 3, "chunk": 128, "page_size": 8},
        {"speculate": 2, "page_size": 64, "max_batch": 1, "prefill_batch": 1},
        {"speculate": 0, "max_batch": 5, "prefill_batch": 4},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_an_answer_does_not_depend_on_how_it_is_computed(
    folders: dict[str, Path], plain: list[Any], options: dict[str, Any]
) -> None:
    llm = engine(folders["t4"], **options)
    for turn, (params, want) in enumerate(zip(PARAMS, plain, strict=True)):
        step = (-1) ** turn  # rows are reused, with other neighbours
        assert answers(llm, REQUESTS[::step], params) == want[::step]


def test_company_in_one_batch_may_mix_every_kind_of_request(
    folders: dict[str, Path], plain: list[Any]
) -> None:
    llm = engine(folders["t4"], max_batch=4, graph="tape")
    watched = PoisonedEngine(llm)
    requests = [prompt for prompt in REQUESTS for _ in PARAMS]
    want = [plain[index][at] for at in range(len(REQUESTS)) for index in range(len(PARAMS))]
    assert answers(llm, requests, PARAMS * len(REQUESTS)) == want
    assert watched.checked


@pytest.mark.slow
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_run_of_drafts_may_end_anywhere_in_a_window(folders: dict[str, Path], right: int) -> None:
    """Rejections at every offset within windows of 4 and 8: text and caches as without drafts."""
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    base = engine(folders["t4"], speculate=0, **SOLO)
    llm = engine(folders["t4"], speculate=3, **SOLO)
    watched, scripted = PoisonedEngine(llm, chance=0.1), ScriptedDrafts(llm)
    for length in range(1, 13):
        prompt = REQUESTS[0][:1] * length if length % 2 else REQUESTS[1][:length]
        want = answers(base, [prompt], params)[0]
        scripted.script, scripted.right = [*prompt, *want, *[0] * 8], right
        output = llm.generate([prompt], params)[0]
        assert output.token_ids == want
        assert output.metrics.rounds == 1 + -(-13 // (right + 1))
    assert watched.checked >= 3


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], tuple[int, ...]]:
    """A model with the published ratios and window, a prompt, and 310 tokens after it."""
    folder = tmp_path_factory.mktemp("published") / "model"
    write_checkpoint(folder, PUBLISHED_RATIOS, stream_tensors(PUBLISHED_RATIOS, seed=3))
    llm = engine(folder, page_size=128, speculate=0, **SOLO)
    prompt = REQUESTS[1][:5]
    return folder, prompt, answers(llm, [prompt], LONG)[0]


LONG = SamplingParams(temperature=0, max_tokens=310, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "accepted"), [(1, (0, 1)), (3, (0, 1, 2, 3)), (7, (0, 2, 4, 7))])
def test_published_windows_are_crossed_alike_with_every_acceptance(
    published: tuple[Path, list[int], tuple[int, ...]], depth: int, accepted: tuple[int, ...]
) -> None:
    folder, prompt, want = published
    llm = engine(folder, page_size=256, speculate=depth, **SOLO)
    PoisonedEngine(llm, chance=0)
    scripted = ScriptedDrafts(llm)
    for right in accepted:
        scripted.script, scripted.right = [*prompt, *want, *[0] * 8], right
        output = llm.generate([prompt], LONG)[0]
        assert output.token_ids == want
        assert output.metrics.rounds == 1 + -(-309 // (right + 1))


def test_drafts_are_the_same_alone_and_in_company(folders: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def drafted(llm: LLM, requests: list[list[int]]) -> set[tuple[int, ...]]:
        seen: set[tuple[int, ...]] = set()
        launch = llm.executor.launch

        def watch(plan: StepPlan) -> None:
            launch(plan)
            state = llm.executor.state
            for row in plan.rows:
                ends = int(state.known_lens[row]) + int(state.draft_lens[row])
                if int(state.draft_lens[row]):
                    seen.add(tuple(state.tokens[row, :ends].tolist()))

        llm.executor.launch = watch  # type: ignore[method-assign]
        answers(llm, requests, params)
        llm.executor.launch = launch  # type: ignore[method-assign]
        return seen

    alone = engine(folders["t4"], speculate=3, **SOLO)
    one, two = (drafted(alone, [prompt]) for prompt in REQUESTS[:2])
    together = engine(folders["t4"], speculate=3, run_ahead=0, max_batch=2, prefill_batch=1)
    assert drafted(together, REQUESTS[:2]) == one | two


@pytest.mark.slow
def test_drafts_are_accepted_alike_whatever_the_chunks(folders: dict[str, Path]) -> None:
    """The draft layer reads the next token of the prompt at a chunk's tail, not a chosen one."""
    counts: set[tuple[int, ...]] = set()
    for chunk in (9, 16, 45):
        llm = engine(folders["t4"], speculate=3, chunk=chunk, max_batch=1, prefill_batch=1)
        outputs = [llm.generate([prompt], PARAMS[0])[0] for prompt in REQUESTS]
        rounds = (o.metrics.completion_tokens - 1 - o.metrics.accepted for o in outputs)
        counts.add(tuple(rounds))
    assert len(counts) == 1


def test_idle_rounds_write_nothing_but_scratch(folders: dict[str, Path]) -> None:
    """Padding rows have no length at all: no window is theirs to close."""
    llm = engine(folders["t4"])
    arena = llm.executor.arena
    for name in arena.names():
        if name.startswith("cache."):
            arena[name].zero_()  # pages start undefined
    answers(llm, REQUESTS[:3])
    before = {name: arena[name].clone() for name in arena.names()}
    shape = llm.built.ladder.decode[-1]
    for round_id in range(3):
        llm.executor.launch(StepPlan(round_id, shape, (), (), (), ()))
        llm.executor.collect()
    for name, tensor in before.items():
        if name.startswith("cache."):
            assert same_bytes(arena[name][:, 1:], tensor[:, 1:]), name
            assert arena[name].isfinite().all(), name


def test_pools_are_whole_again_and_windows_hold_no_more_than_they_promise(
    folders: dict[str, Path],
) -> None:
    llm = engine(folders["t4"], max_batch=2)
    reservations = llm._session._scheduler.copies[0].roster.reservations
    held: list[int] = []
    launch = llm.executor.launch

    def watch(plan: StepPlan) -> None:
        held.append(reservations.pools[0].owned)
        launch(plan)

    llm.executor.launch = watch  # type: ignore[method-assign]
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    answers(llm, [REQUESTS[0][:20], REQUESTS[1][:20]], long)
    reservations.check()
    assert all((pool.owned, pool.quarantined) == (0, 0) for pool in reservations.pools)
    whole = 2 * llm.built.groups[0].pages_for(110)
    assert max(held) < whole


def test_a_host_read_in_the_model_is_refused_at_capture(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = DeepseekV4.forward

    def reading(self: Any, view: Any, cache: Any) -> Any:
        view.kv_lens.max().item()
        return forward(self, view, cache)

    monkeypatch.setattr(DeepseekV4, "forward", reading)
    with pytest.raises(HostSync, match=r"test_stream_rules\.py"):
        answers(engine(folders["t4"]), [[1, 2, 3]])


def test_an_audit_counts_one_letter_each_way_and_one_graph_a_round(
    folders: dict[str, Path],
) -> None:
    llm = engine(folders["t4"], dtype="float32", speculate=3, guard=True, max_batch=2)
    report = audit(llm, rounds=60)
    assert report.passed and report.rounds >= 60
    assert report.host_reads == report.unplanned_copies == 0


def test_the_survey_says_what_a_token_and_a_request_cost(folders: dict[str, Path]) -> None:
    """Of the latest tokens a request holds a few pages, however long it is."""
    found = survey(EngineConfig(model=str(folders["t4"]), page_size=16, dtype="float32"))
    by_name = {g.name: (g, n) for g, n in zip(found.groups, found.request_pages, strict=True)}
    assert by_name["compressed4"][1] == by_name["compressed8"][1] == 128 // 16
    assert by_name["window"][1] == by_name["tail8"][1] == (8 + 7 - 2) // 16 + 2
    assert by_name["tail4"][0].token_bytes == 2 * 4 * (4 * 32 + 4 * 16)
    assert by_name["compressed8"][0].token_bytes == 32 * 4 / 8


def test_a_page_that_would_end_within_a_window_is_refused_before_weights_are_read(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(ConfigError, match="page_size: must be a multiple of 8"):
        engine(folders["t4"], page_size=4)
