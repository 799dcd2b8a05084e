# SPDX-License-Identifier: Apache-2.0
"""Two processes that share a model answer as one does, and end when one of them is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.errors import ConfigError, RankError
from freewheel.graph import TapeGraph
from freewheel.runtime.parallel import crew as crew_module
from freewheel.runtime.parallel.crew import LocalCrew, assemble, dismiss
from tests.waiting import PATIENCE, ranks_of, runs, wait_for

COLLECTIVES = {
    f"freewheel::{name}" for name in ("all_reduce", "all_gather", "split_embedding", "own_experts")
}
ROOT = Path(__file__).parents[2]
PROMPTS = ["Emma was", "The king spoke to the people, and said that they"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.9, seed=7, max_tokens=20),
]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "chunk": 16,
    "context_len": 512,
    "max_batch": 2,
    "grammar_seconds": PATIENCE,
}
"""float64: sums over ranks are made in another order than in one process, and round otherwise."""


@pytest.fixture(scope="module", autouse=True)
def crew() -> object:
    yield
    dismiss()


def answers(model: str, **options: Any) -> list[tuple[int, ...]]:
    outputs = LLM(model, **SMALL, **options).generate(PROMPTS, PARAMS)
    return [one.token_ids for one in outputs]


@pytest.mark.parametrize("model", ["demo", "demo-v4"])
@pytest.mark.parametrize(("depth", "ep"), [(0, False), (3, False), (3, True)])
def test_two_processes_decide_the_tokens_of_one(model: str, depth: int, ep: bool) -> None:
    """Where experts are dealt out, the index scan is shared as well."""
    alone = answers(model, speculate=depth)
    shared = {"tp": 2, "ep": ep, "check_ranks": True, "split_scan": 512 if ep else 513}
    assert answers(model, speculate=depth, **shared) == alone


@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_what_a_canary_finds_on_one_rank_strikes_the_row_on_all(model: str) -> None:
    options: dict[str, Any] = SMALL | {"speculate": 2, "run_ahead": 2}
    alone = LLM(model, **options).generate(PROMPTS, PARAMS)
    llm = LLM(model, **options, tp=2, canary="all")
    assert llm.generate(PROMPTS, PARAMS)[1].token_ids == alone[1].token_ids
    assert not llm.alarm.counts
    (group, *_) = [g for g in llm.built.groups if g.retention is None]
    prompt = list(range(100, 100 + 2 * max(g.page_size for g in llm.built.groups)))[:300]
    first = llm.generate([prompt], PARAMS[0])[0]
    kept = llm.generate([prompt], PARAMS[0])[0]
    assert kept.token_ids == first.token_ids
    assert kept.metrics.cached_tokens == (len(prompt) - 1 if model == "demo" else 256)
    stored = llm.executor.cache.stored(group.name)[0]
    whole = stored.clone()
    stored[:, 1:] += 1
    llm.executor.mirror()
    stored.copy_(whole)  # now the other rank alone is damaged
    again = llm.generate([prompt], PARAMS[0])[0]
    assert first.metrics.cached_tokens == 0 and again.token_ids == first.token_ids
    assert llm.alarm.counts.total() == 1


@pytest.mark.slow
def test_damage_on_purpose_under_tp_and_dp_changes_no_answer() -> None:
    alone = answers("demo", speculate=3)
    kinds: list[dict[str, Any]] = [{"tp": 2}, {"dp": 2, "ep": True}]
    for shared in kinds:
        dismiss()
        llm = LLM("demo", **SMALL, speculate=3, canary="all", perturb=2, **shared)
        found = [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
        assert found == alone and llm.alarm.counts.total() > 0
    dismiss()


WARM: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
WISHES = {
    "scores": SamplingParams(**WARM, presence_penalty=1.0, logprobs=2),
    "echo": SamplingParams(**WARM, prompt_logprobs=1),
    "biases": SamplingParams(**WARM, logit_bias={300: 5.0}, bad_words=("the",), min_p=0.01),
    "table": SamplingParams(**WARM, regex="[a-f ]{5,12}"),
    "guide": SamplingParams(**WARM, grammar='start: "a" start "b" | "c"'),
    "budget": SamplingParams(**WARM, json_object=True, thinking_token_budget=3),
    "stop": SamplingParams(temperature=0, max_tokens=12, stop=("a",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [3, "auto"])
def test_two_processes_keep_every_wish_as_one_does(speculate: int | str) -> None:
    """Side by side: what one asks for is in the rounds of all. `auto` chooses by rank 0's clock."""
    pytest.importorskip("llguidance")
    small = SMALL | {"max_batch": 4, "max_grammars": 1, "graph": "eager"}
    asked, params = [[5, 6, 7, 300 + n] for n in range(len(WISHES))], list(WISHES.values())
    alone = LLM("demo", **small, speculate=0).generate(asked, params)
    both = LLM("demo", **small, speculate=speculate, tp=2, check_ranks=True)
    for one, other in zip(alone, both.generate(asked, params), strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert one.finish_reason == other.finish_reason


def test_one_process_makes_no_calls_for_others() -> None:
    llm = LLM("demo", **SMALL, speculate=3)
    llm.generate(PROMPTS[0], PARAMS[0])
    graphs = [lane.graph for lane in llm.executor._lanes.values()]
    assert all(isinstance(graph, TapeGraph) for graph in graphs) and graphs
    for graph in graphs:
        assert isinstance(graph, TapeGraph)
        assert not graph.counts.keys() & COLLECTIVES


def test_a_lost_rank_ends_what_is_under_way_and_another_engine_starts_anew() -> None:
    llm = LLM("demo", **SMALL, tp=2)
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=400))
    next(stream)
    crew = assemble("cpu", 2)
    assert isinstance(crew, LocalCrew)
    os.kill(crew.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
        list(stream)
    with pytest.raises(RankError):
        llm.generate(PROMPTS[0], PARAMS[0])
    again = LLM("demo", **SMALL, tp=2)
    assert again.generate(PROMPTS[0], PARAMS[0])[0].token_ids == answers("demo")[0]


def test_graphs_are_given_back_before_the_groups_that_they_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL closes no group that a graph still holds, though its owner lives on; so it would wait
    for good where a program ends with an engine in its hands."""
    llm = LLM("demo", **SMALL, tp=2, graph="tape")
    llm.generate(PROMPTS[0], PARAMS[0])
    graphs = [weakref.ref(lane.graph) for lane in llm.executor._lanes.values()]
    left: list[int] = []
    close = crew_module.close_groups

    def close_groups() -> None:
        left.append(sum(graph() is not None for graph in graphs))
        close()

    monkeypatch.setattr(crew_module, "close_groups", close_groups)
    dismiss()
    assert graphs and left == [0]
    with pytest.raises(RankError):
        llm.generate(PROMPTS[0], PARAMS[0])


LEADER = """
import sys
from freewheel import LLM, SamplingParams
from freewheel.runtime.parallel.crew import assemble
if __name__ == "__main__":
    llm = LLM("demo", device="cpu", context_len=512, chunk=16, max_batch=2, tp=2)
    while True:
        stream = llm.stream("Emma was", SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        print(assemble("cpu", 2).pids[1], flush=True)
        for _ in stream:
            pass
"""


def test_ranks_end_by_themselves_when_rank_0_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert leader.stdout is not None and leader.stderr is not None
    follower = int(leader.stdout.readline())
    assert runs(follower)
    leader.kill()
    leader.wait(PATIENCE)
    assert "another rank of this engine is gone" in leader.stderr.read()  # ends as the rank does
    wait_for("the end of rank 1", lambda: not runs(follower))


COMMAND = ("generate", "demo", "--prompt", "Emma", "--max-tokens", "4000", "--ignore-eos")


@pytest.mark.parametrize("when", ["loading", "answering"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_command_that_started_it(when: str, how: int) -> None:
    """An interrupt leaves a round half done, in which the other rank waits for ever."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    leader = subprocess.Popen(
        [sys.executable, "-m", "freewheel", *COMMAND, "--tp", "2", "--device", "cpu"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert leader.stdout is not None
    if when == "answering":
        assert leader.stdout.read(40)
    (follower,) = wait_for("rank 1", lambda: ranks_of(leader.pid))
    leader.send_signal(how)
    assert leader.wait(PATIENCE) == (130 if how == signal.SIGINT else -how)
    wait_for("the end of rank 1", lambda: not runs(follower))


def test_a_process_leads_one_mesh() -> None:
    assemble("cpu", 2)
    with pytest.raises(ConfigError, match="this process leads 2 ranks on cpu already"):
        assemble("cpu", 4)


def test_what_ranks_cannot_share_is_refused_before_any_is_started() -> None:
    with pytest.raises(ConfigError, match="tp: 3 ranks cannot share"):
        LLM("demo", **SMALL, tp=3)
    with pytest.raises(ConfigError, match="ep: is for several ranks"):
        LLM("demo", **SMALL, ep=True)


@pytest.mark.parametrize("mesh", [("2", "1"), ("1", "2")])
def test_index_lists_are_the_same_bytes_on_both_ranks_and_a_dissenter_is_named(
    tmp_path: Path, mesh: tuple[str, str]
) -> None:
    outs = [tmp_path / f"out.{rank}" for rank in range(2)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.parallel.rank_script"),
                *(str(tmp_path / "store"), str(rank), str(out), *mesh),
            ],
            env=environment,
            cwd=ROOT,
        )
        for rank, out in enumerate(outs)
    ]
    assert [process.wait(PATIENCE) for process in ranks] == [0, 0]
    found = [json.loads(out.read_text("utf-8")) for out in outs]
    assert found[0]["picks"] == found[1]["picks"]
    assert all(len(picks) > 2 for picks in found[0]["picks"].values())
    for one in found:
        dissent = "check_ranks: rank 1 decided otherwise than rank 0 in the second round"
        assert one["said"] == (dissent if mesh[0] == "2" else "")  # copies may differ
