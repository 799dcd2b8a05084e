# SPDX-License-Identifier: Apache-2.0
"""`freewheel bench`: its counts are right where they are known, and nothing else is counted."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freewheel import LLM, FinishReason, Metrics, Output, SamplingParams
from freewheel.bench import BenchRun, Workload, bench, count_differing, plan_runs, quantile, summary
from freewheel.cli import main
from freewheel.engine import Arrival, Machine, Resolved
from freewheel.errors import ConfigError, RequestError
from freewheel.spec import StepPlan, StepShape
from tests.fixtures.closed_form import perm_run
from tests.program.whitebox import engine

Command = Callable[..., SimpleNamespace]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `freewheel bench` with small engines; gives its exit code and what it wrote."""

    def run(folder: Path, *args: str) -> SimpleNamespace:
        small = ["--dtype", "float64", "--chunk", "16"]
        monkeypatch.setattr(sys, "argv", ["freewheel", "bench", str(folder), *small, *args])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def read(ran: SimpleNamespace) -> dict[str, Any]:
    """The one JSON object that a run wrote."""
    assert ran.code == 0, ran.err
    (line,) = ran.out.splitlines()
    return json.loads(line)


SHORT = ("--max-tokens", "13", "--prompt-tokens", "5")


def test_perm_accepts_every_draft_at_every_position(
    command: Command, folders: dict[str, Path]
) -> None:
    ran = command(folders["perm"], "--batch", "1,2", *SHORT, "--requests", "4", "--json")
    report = read(ran)
    assert [(r["max_concurrency"], r["speculate"]) for r in report["runs"]] == [
        (1, 0),
        (1, 3),
        (2, 0),
        (2, 3),
    ]
    for run in report["runs"]:
        assert run["completed"] == 4
        assert (run["total_input_tokens"], run["total_output_tokens"]) == (20, 52)
        assert run["late_captures"] == run["differing_tokens"] == 0
    for run in report["runs"][1::2]:
        assert run["tokens_per_round"] == 13 / 4
        assert run["drafted_per_position"] == run["accepted_per_position"] == [12, 12, 12]
        assert run["spec_decode_acceptance_rate"] == 100
        assert run["spec_decode_acceptance_length"] == 4
        assert run["spec_decode_per_position_acceptance_rates"] == [1, 1, 1]
    for run in report["runs"][::2]:
        assert (run["tokens_per_round"], run["drafter"]) == (1, "none")
        assert run["accepted_per_position"] == []
        assert run["spec_decode_acceptance_rate"] is None


def test_perm_x_is_wrong_at_the_third_position_once(
    command: Command, folders: dict[str, Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("'\n\n", encoding="utf-8")
    options = ("--batch", "1", "--speculate", "3", "--max-tokens", "16")
    report = read(command(folders["perm_x"], *options, "--prompt-file", str(prompts), "--json"))
    (run,) = report["runs"]
    assert run["completed"] == 1 and report["workload"]["prompts"] == "1 given texts in turn"
    assert run["drafted_per_position"] == [4, 4, 4]
    assert run["accepted_per_position"] == [4, 4, 3]
    assert run["spec_decode_accepted_tokens"] == 11


def test_the_json_says_what_was_run_and_where(command: Command, folders: dict[str, Path]) -> None:
    ran = command(folders["t32"], "--batch", "1", "--speculate", "1", *SHORT, "--json")
    report = read(ran)
    assert "loading" in ran.err
    assert report["workload"] == {
        "prompts": "5 random token ids each, seed 0",
        "prompt_tokens": 5,
        "requests": 2,
        "max_tokens": 13,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
    }
    assert (report["dtype"], report["graph"], report["context_len"]) == ("float64", "tape", 128)
    assert {"device", "processor", "threads", "torch_version"} <= report["machine"].keys()
    (run,) = report["runs"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < run[f"median_{name}_ms"] <= run[f"p99_{name}_ms"]
    assert run["output_throughput"] == pytest.approx(26 / run["duration"])
    assert run["request_throughput"] == pytest.approx(2 / run["duration"])
    assert run["mean_round_ms"] * run["rounds"] == pytest.approx(1000 * run["duration"])


def test_the_table_has_one_row_for_each_pair_and_says_that_ids_are_random(
    command: Command, folders: dict[str, Path]
) -> None:
    ran = command(folders["perm"], "--batch", "1,2", *SHORT)
    lines = ran.out.splitlines()
    (head,) = (n for n, line in enumerate(lines) if line.startswith("batch"))
    assert [line.split()[:2] for line in lines[head + 1 :]] == [
        ["1", "0"],
        ["1", "3"],
        ["2", "0"],
        ["2", "3"],
    ]
    assert "12/12 12/12 12/12" in lines[head + 2]
    assert "random token ids" in ran.out and "random ids are not text" in ran.out


@pytest.mark.parametrize("options", [("--temperature", "0"), ("--temperature", "1.3")])
def test_no_token_differs_whatever_the_batch_and_the_drafts(
    command: Command, folders: dict[str, Path], options: tuple[str, ...]
) -> None:
    args = ("--batch", "1,3", "--speculate", "0,3", *SHORT, "--requests", "4", "--json")
    report = read(command(folders["t32"], *args, *options))
    assert [run["differing_tokens"] for run in report["runs"]] == [0] * 4


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--batch", "0"), "batch"),
        (("--batch", "1,,2"), "batch"),
        (("--batch", "5000"), "batch"),
        (("--speculate", "8"), "speculate"),
        (("--speculate", "few"), "speculate"),
        (("--prompt-tokens", "0"), "--prompt-tokens:"),
        (("--prompt-tokens", "100"), "--max-tokens:"),
        (("--max-tokens", "0"), "--max-tokens:"),
        (("--requests", "0"), "requests"),
        (("--temperature", "-1"), "temperature"),
        (("--seed", "9" * 30), "seed"),
        (("--drafter", "oracle"), "drafter"),
        (("--graph", "banana"), "graph"),
        (("--device", "abacus"), "device"),
        (("--run-ahead", "4"), "--run-ahead:"),
        (("--chunk", "3"), "chunk"),
        (("--context-len", "1000000"), "--context-len:"),
        (("--prompt-file", "/nowhere.txt"), "--prompt-file:"),
        (("--prompt-file", "/dev/null"), "--prompt-file:"),
        (("--prompt-file", "/dev/null", "--prompt-tokens", "3"), "--prompt-tokens:"),
        (("--nonsense",), "nonsense"),
    ],
)
def test_bad_values_exit_2_and_name_the_option(
    command: Command, folders: dict[str, Path], options: tuple[str, ...], names: str
) -> None:
    ran = command(folders["perm"], *options)
    assert ran.code == 2
    assert names in ran.err and not ran.out


def test_a_run_needs_a_batch_and_a_number_of_drafts() -> None:
    for batches, depths in (([], [0]), ([1], [])):
        with pytest.raises(ConfigError, match="at least one number"):
            plan_runs("demo", batches, depths)


def test_only_the_workload_is_counted(folders: dict[str, Path]) -> None:
    """Graphs are captured and a warm-up has run before the first round that counts."""
    opened: list[LLM] = []
    rounds_before_capture: list[int] = []

    def open_engine(**options: Any) -> LLM:
        llm = LLM(**options)
        open_lane = llm.executor._open_lane

        def watch(shape: StepShape) -> Any:
            rounds_before_capture.append(llm.executor.counters.rounds)
            return open_lane(shape)

        llm.executor._open_lane = watch  # type: ignore[method-assign]
        opened.append(llm)
        return llm

    configs = plan_runs(str(folders["perm"]), [2], [3], chunk=16, run_ahead=0)
    workload = Workload(requests=2, max_tokens=13, prompt_tokens=5)
    (run,) = bench(configs, workload, open_engine)
    (llm,) = opened
    assert run.late_captures == llm.executor.counters.late_captures == 0
    assert run.rounds == 1 + 3  # both prompts share a round, then 4 tokens a round
    assert llm.executor.counters.rounds == run.rounds + 1 + 2  # the warm-up: 8 tokens
    assert rounds_before_capture == [0] * len(llm.built.ladder.shapes())
    assert min(run.duration, run.warm_up_seconds, run.capture_seconds) > 0


def test_every_engine_serves_the_same_prompts(folders: dict[str, Path]) -> None:
    llm = engine(folders["perm"])
    workload = Workload(requests=3, prompt_tokens=4, max_tokens=8)
    assert workload.prompts(llm) == workload.prompts(engine(folders["perm"], speculate=0))
    assert workload.prompts(llm) != Workload(requests=3, prompt_tokens=4, seed=1).prompts(llm)
    texts = Workload(requests=3, max_tokens=8, texts=("'", "A")).prompts(llm)
    assert texts == [[7], [33], [7]]
    with pytest.raises(RequestError, match="max_tokens"):
        Workload(requests=1, prompt_tokens=100, max_tokens=29).prompts(llm)


@pytest.mark.parametrize("at_once", [1, 2, 3, 9])
def test_a_closed_loop_keeps_so_many_under_way_and_gives_the_same_answers(
    folders: dict[str, Path], at_once: int
) -> None:
    llm = engine(folders["perm"], max_batch=4)
    launch, together = llm.executor.launch, 0

    def watch(plan: StepPlan) -> None:
        nonlocal together
        together = max(together, len(llm._session._live))
        launch(plan)

    llm.executor.launch = watch  # type: ignore[method-assign]
    rng = random.Random(0)
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randint(1, 15), ignore_eos=True)
        for _ in range(7)
    ]
    outputs = llm.generate([[n] for n in range(7)], params, at_once=at_once)
    assert together == min(at_once, 7)
    for first, (output, each) in enumerate(zip(outputs, params, strict=True)):
        assert each.max_tokens is not None
        assert output.token_ids == tuple(perm_run(first, each.max_tokens))
    with pytest.raises(RequestError, match="at_once"):
        llm.generate([[1]], at_once=0)


def test_arrivals_add_up_to_the_metrics(folders: dict[str, Path]) -> None:
    llm = engine(folders["perm_x"], max_batch=1, prefill_batch=1, speculate=3)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    metrics = llm.generate([[7]], params)[0].metrics
    assert [(a.tokens, a.drafted, a.accepted) for a in metrics.arrivals] == [
        (1, 0, 0),
        (3, 3, 2),
        (4, 3, 3),
        (4, 3, 3),
        (4, 3, 3),
    ]
    assert (metrics.rounds, metrics.drafted, metrics.accepted) == (5, 12, 11)
    seconds = [a.seconds for a in metrics.arrivals]
    assert seconds == sorted(seconds) and seconds[0] == metrics.first_token_seconds
    assert seconds[-1] <= metrics.total_seconds


def test_a_stop_string_cuts_arrivals_to_the_tokens_that_count(folders: dict[str, Path]) -> None:
    llm = engine(folders["perm"], max_batch=1, prefill_batch=1, speculate=3)
    text = "".join(chr(32 + token) for token in perm_run(7, 13))
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True, stop=(text[6],))
    output = llm.generate([[7]], params)[0]
    assert sum(a.tokens for a in output.metrics.arrivals) == len(output.token_ids) == 7
    assert [a.accepted for a in output.metrics.arrivals] == [0, 3, 2]


def output_of(ids: tuple[int, ...], arrivals: tuple[Arrival, ...]) -> Output:
    first, last = arrivals[0].seconds, arrivals[-1].seconds
    metrics = Metrics(2, 0, len(ids), 0, 0, first, last, arrivals)
    return Output("", ids, FinishReason.LENGTH, metrics)


def test_times_are_taken_from_arrivals() -> None:
    outputs = (
        output_of((1, 2, 3, 4), (Arrival(0.5, 1, 0, 0), Arrival(1.1, 3, 3, 2))),
        output_of((1, 2), (Arrival(0.1, 1, 0, 0), Arrival(0.2, 1, 2, 0))),
        output_of((1,), (Arrival(0.3, 1, 0, 0),)),
    )
    resolved = Resolved("cpu", "tape", "float32", "mtp")
    machine = Machine.here("cpu")
    run = BenchRun(2, 3, resolved, machine, 64, 1, 1, 1, 2.0, 4, 0, outputs, 0)
    found = summary(run)
    times = {name: value for name, value in found.items() if name.endswith("_ms")}
    assert times == pytest.approx(
        {
            "mean_ttft_ms": 300,
            "median_ttft_ms": 300,
            "p99_ttft_ms": 300 + 0.98 * 200,
            "mean_tpot_ms": 150,
            "median_tpot_ms": 150,
            "p99_tpot_ms": 199,
            "mean_itl_ms": 350,
            "median_itl_ms": 350,
            "p99_itl_ms": 100 + 0.99 * 500,
            "mean_e2el_ms": 1600 / 3,
            "median_e2el_ms": 300,
            "p99_e2el_ms": 300 + 0.98 * 800,
            "mean_round_ms": 500,
        }
    )
    assert found["drafted_per_position"] == [2, 2, 1]
    assert found["accepted_per_position"] == [1, 1, 0]
    assert found["total_token_throughput"] == (6 + 7) / 2


def test_a_time_that_nothing_had_is_none(command: Command, folders: dict[str, Path]) -> None:
    args = ("--batch", "1", "--max-tokens", "1", "--prompt-tokens", "5", "--json")
    for run in read(command(folders["perm"], *args))["runs"]:
        assert (
            run["mean_tpot_ms"] is run["p99_itl_ms"] is run["spec_decode_acceptance_rate"] is None
        )
        assert run["mean_ttft_ms"] > 0


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_quantiles_are_numpys(count: int) -> None:
    rng = random.Random(count)
    values = sorted(rng.random() for _ in range(count))
    for share in (0, 0.25, 0.5, 0.99, 1):
        assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)))
    assert quantile([], 0.5) is None


def test_differing_tokens_count_positions_and_missing_tokens() -> None:
    runs = [(1, 2, 3), (1, 2, 3), (1, 9, 3), (1, 2), (1, 2, 3, 4)]
    once = (Arrival(1, 1, 0, 0),)
    outputs = [[output_of(ids, once)] for ids in runs]
    assert [count_differing(outputs[0], other) for other in outputs] == [0, 0, 1, 1, 1]
    both = list(itertools.chain(*outputs[2:4]))
    assert count_differing([*outputs[0], *outputs[0]], both) == 2
