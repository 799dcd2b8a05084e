# SPDX-License-Identifier: Apache-2.0
"""The simulator against cases that can be worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from freewheel.cli.simulate import _made
from freewheel.config import EngineConfig
from freewheel.errors import ConfigError, RequestError
from freewheel.simulate import (
    UNLIMITED,
    Call,
    Made,
    Outcome,
    Replay,
    RoundCost,
    Simulation,
    Trace,
    make,
    read_measured,
    read_trace,
    report,
    simulation,
    write_trace,
)
from freewheel.simulate.costs import straight
from freewheel.simulate.report import distribution
from freewheel.spec import StepShape
from tests.waiting import PATIENCE

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
FAMILIES = {"v32": "v32_tp8shard.json", "v4": "v4flash_tp8shard.json"}
A_SECOND = RoundCost(fixed=1.0, per_token=0.0, per_key=0.0)


def planned(
    trace: Trace,
    cost: RoundCost = A_SECOND,
    accept: tuple[float, ...] = (),
    pages: int | None = UNLIMITED,
    family: str = "v32",
    **options: Any,
) -> Simulation:
    defaults: dict[str, Any] = {"speculate": len(accept), "chunk": 1024, "max_batch": 8}
    given = defaults | {"cache_bytes": 1 << 40, "load_format": "dummy"} | options
    config = EngineConfig(model=str(CONFIGS / FAMILIES[family]), **given)
    return simulation(config, trace, accept, cost, pages)


def run(trace: Trace, *arguments: Any, **options: Any) -> Outcome:
    return Replay(planned(trace, *arguments, **options), trace).run()


def trace_of(*calls: Call) -> Trace:
    return Trace(calls)


def call(arrival: float, prompt: int, answer: int, *first: int) -> Call:
    """A call whose blocks are `first`, and then its own."""
    own = tuple(1000 + round(arrival * 1000) * 100 + n for n in range(-(-prompt // 512)))
    return Call(arrival, prompt, answer, (*first, *own[len(first) :]))


@pytest.mark.parametrize("run_ahead", [0, 2, 3])
def test_a_lone_request_takes_a_round_for_its_prompt_and_one_for_each_further_token(
    run_ahead: int,
) -> None:
    found = run(trace_of(call(0, 100, 5)), run_ahead=run_ahead)
    assert (found.prompt_rounds, found.decode_rounds) == (1, 4)
    assert (found.first_token, found.per_token, found.whole) == ([1.0], [1.0], [5.0])


def test_drafts_that_are_always_right_divide_the_rounds() -> None:
    found = run(trace_of(call(0, 100, 9)), A_SECOND, (1.0, 1.0, 1.0), run_ahead=0)
    assert (found.decode_rounds, found.whole) == (2, [3.0])


def test_drafts_that_are_never_right_change_nothing() -> None:
    with_drafts = run(trace_of(call(0, 100, 9)), A_SECOND, (0.0, 0.0), run_ahead=0)
    assert (with_drafts.decode_rounds, with_drafts.whole) == (8, [9.0])


def test_tokens_of_a_round_are_what_the_shares_say_on_average() -> None:
    accept = (0.8, 0.5, 0.3)
    found = run(trace_of(*(call(n * 1e4, 10, 2001) for n in range(3))), A_SECOND, accept)
    expected = 1 + sum(accept)
    assert 2000 * 3 / found.decode_rounds == pytest.approx(expected, rel=0.03)


def test_a_long_prompt_costs_its_rectangles() -> None:
    cost = RoundCost(fixed=0.0, per_token=0.001, per_key=0.0)
    found = run(trace_of(call(0, 1000, 1)), cost, chunk=256)
    assert found.prompt_rounds == 4
    assert found.first_token == [pytest.approx(4 * 0.256)]


def test_keys_cost_what_stands_behind_each_rectangle() -> None:
    cost = RoundCost(fixed=0.0, per_token=0.0, per_key=1.0)
    found = run(trace_of(call(0, 100, 3)), cost, run_ahead=0)
    assert found.whole == [100 + 101 + 102]


def test_a_prompt_found_again_counts_whole_pages_or_all_but_its_last_token() -> None:
    twins = trace_of(call(0, 640, 3, 7, 8), call(100, 640, 3, 7, 8))
    assert run(twins).cached_tokens == 639
    assert run(twins, family="v4").cached_tokens == 512, "which cannot start within a page"
    longer = trace_of(call(0, 640, 3, 7, 8), call(100, 900, 3, 7, 8))
    assert run(longer).cached_tokens == 640, "the answer went on as the longer prompt does"
    assert run(twins, prefix_cache=False).cached_tokens == 0


def test_an_answer_is_found_by_the_next_turn_where_the_trace_says_what_it_was() -> None:
    said = trace_of(Call(0, 300, 213, (1, 2)), Call(1000, 600, 3, (1, 2)))
    assert run(said).cached_tokens == 512, "513 tokens are known, 512 computed"
    half = trace_of(Call(0, 300, 213, (1,)), Call(1000, 600, 3, (1, 2)))
    assert run(half).cached_tokens == 448, "the token behind 512 is another one"
    public = trace_of(Call(0, 300, 213, (1,)), Call(1000, 600, 3, (9, 2)))
    assert run(public).cached_tokens == 0


def test_pages_in_use_are_those_of_the_tokens() -> None:
    found = run(trace_of(call(0, 640, 65)), run_ahead=0, prefix_cache=False)
    (use,) = found.pools
    assert use.peak_owned == 11
    kept = run(trace_of(call(0, 640, 65), call(1000, 10, 2)), run_ahead=0)
    assert kept.pools[0].peak_held >= 11
    assert kept.pools[0].held_seconds > kept.pools[0].owned_seconds


def test_arrivals_are_waited_for_and_a_full_engine_queues() -> None:
    late = run(trace_of(call(0, 10, 1), call(50, 10, 1)))
    assert (late.first_token, late.seconds) == ([1.0, 1.0], 51.0)
    calls = (call(0, 10, 3, 1), call(0, 10, 3, 2))
    full = run(trace_of(*calls), max_batch=1, prefill_batch=1, run_ahead=0)
    assert full.first_token == [1.0, 4.0]


def test_a_better_priority_goes_first() -> None:
    calls = (call(0, 10, 3, 1), call(0, 10, 3, 2), replace(call(0, 10, 3, 3), priority=-1))
    found = run(trace_of(*calls), max_batch=1, prefill_batch=1, run_ahead=0)
    assert found.first_token == [1.0, 4.0, 7.0]
    replay = Replay(planned(trace_of(*calls), max_batch=1, prefill_batch=1), trace_of(*calls))
    replay.step()
    (running,) = replay.scheduler.roster.running
    assert running.priority == -1


def test_what_cannot_be_served_is_counted_by_the_field_to_blame() -> None:
    calls = (call(0, 100, 5), call(1, 400, 5), call(2, 100, 500))
    found = run(trace_of(*calls), pages=4, context_len=256)
    assert found.refused == {"prompt": 1}
    assert len(found.whole) == 2


def test_few_pages_lead_to_preemptions_and_everybody_is_served() -> None:
    calls = tuple(call(n / 10, 200, 300, n) for n in range(8))
    found = run(trace_of(*calls), A_SECOND, (0.5,), pages=20, context_len=600)
    assert found.preemptions > 0
    assert (len(found.whole), found.answer_tokens) == (8, 2400)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_cost_no_hits_and_a_cache_of_the_live_conversations_misses_little(
    family: str,
) -> None:
    """Turns of several conversations; the cache holds a part of what the trace ever writes."""
    trace = make(Made(conversations=40, turns=5, seconds=1600, system_tokens=1024, seed=3))
    cost = RoundCost()
    pages = {"v32": 1000, "v4": 400}[family]
    options: dict[str, Any] = {"family": family, "context_len": 8192, "max_batch": 16}
    bound = run(trace, cost, **options).hit_rate
    plain = run(trace, cost, pages=pages, **options).hit_rate
    drafted = run(trace, cost, (0.8, 0.6, 0.45), pages=pages, **options).hit_rate
    assert bound > 0.6
    assert abs(drafted - plain) <= 0.01
    assert bound - drafted <= 0.02


def test_the_same_trace_gives_the_same_figures() -> None:
    trace = make(Made(conversations=10, turns=3, seconds=10))
    first, second = (run(trace, RoundCost(), (0.7, 0.4), pages=200) for _ in range(2))
    assert report(first, 1.0) == report(second, 1.0)


def test_a_made_conversation_is_one_stream_that_begins_with_its_system_prompt() -> None:
    trace = make(Made(conversations=6, turns=4, systems=2, system_tokens=1100))
    starts = {one.blocks[:2] for one in trace.calls}
    assert len(starts) == 2, "two blocks of 512 are shared; the third is each one's own"
    by_stream: dict[int, list[Call]] = {}
    for one in trace.calls:
        by_stream.setdefault(one.blocks[2], []).append(one)
    assert len(by_stream) == 6
    for turns in by_stream.values():
        turns.sort(key=lambda one: one.prompt)
        for before, after in pairwise(turns):
            assert after.prompt > before.prompt + before.answer
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert after.arrival >= before.arrival


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    calls = (
        Call(0.0, 600, 5, (1, 2)),
        Call(0.25, 3, 700, (1, 9), priority=-2, tenant="somebody"),
    )
    file = tmp_path / "trace.jsonl"
    write_trace(file, calls)
    assert read_trace(file).calls == calls
    assert read_trace(file, limit=1).calls == calls[:1]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 must be an object"),
        ('{"timestamp": "x"}', "timestamp"),
        ('{"timestamp": 0, "input_length": 0}', "input_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": true}', "output_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "cover 513"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_its_field(
    tmp_path: Path, line: str, named: str
) -> None:
    file = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], "type": "x"}'
    file.write_text(f"{good}\n", "utf-8")
    assert read_trace(file).ignored == ("type",)
    file.write_text(f"{good}\n{line}\n", "utf-8")
    with pytest.raises(RequestError, match=named):
        read_trace(file)


def test_measured_rounds_stand_in_for_the_formula(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    runs = [
        {"batch": b, "context": c, "device_ms_per_round": ms, "slow_host_ms": slow}
        for b, c, ms, slow in [(1, 1000, 10, 0), (8, 1000, 24, 0), (1, 3000, 20, 0), (1, 1, 9, 5)]
    ]
    file.write_text(json.dumps({"runs": runs}), "utf-8")
    cost = RoundCost(1.0, 0.0, 0.0, read_measured([file]))
    assert cost.seconds(StepShape(1, 4, 3), 1000) == pytest.approx(0.010)
    assert cost.seconds(StepShape(4, 4, 3), 4000) == pytest.approx(0.016)
    assert cost.seconds(StepShape(1, 4, 3), 2000) == pytest.approx(0.015)
    assert cost.seconds(StepShape(1, 256, 3), 2000) == 1.0
    file.write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match="costs"):
        read_measured([file])


def test_lines_between_points_are_straight_and_level_beyond() -> None:
    points = [(1.0, 10.0), (3.0, 20.0)]
    assert [straight(points, x) for x in (0, 1, 2, 3, 9)] == [10, 10, 15, 20, 20]


def test_quantiles_are_of_the_nearest_rank() -> None:
    found = distribution([n / 1000 for n in range(1, 101)])
    assert found is not None
    assert [round(found[name]) for name in ("p50", "p90", "p99", "max")] == [50, 90, 99, 100]
    assert distribution([]) is None


@pytest.mark.parametrize("accept", [(0.5, 0.6), (1.1, 0.5), (0.5,)])
def test_shares_that_cannot_be_are_refused(accept: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="accept"):
        planned(trace_of(call(0, 5, 5)), A_SECOND, accept, speculate=2)


def test_nothing_of_it_needs_a_tensor_library() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'triton', 'safetensors'): sys.modules[name] = None\n"
        "from freewheel.simulate import Made, Replay, RoundCost, make, simulation\n"
        "from freewheel.config import EngineConfig\n"
        "trace = make(Made(conversations=2, turns=2))\n"
        "plan = simulation(EngineConfig(model='demo', speculate=1), trace, (0.5,), RoundCost())\n"
        "assert Replay(plan, trace).run().answer_tokens > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_the_command_writes_a_trace_and_reports_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    command = [sys.executable, "-m", "freewheel", "simulate", str(file), "--json"]
    made = ["--make", "conversations=5,turns=2", "--pages", "unlimited"]
    done = subprocess.run([*command, *made], check=True, capture_output=True, timeout=PATIENCE)
    found = json.loads(done.stdout)
    assert (found["served"], found["refused"]) == (10, {})
    assert 0 < found["hit_rate"] < 1
    assert found["engine"]["model"] == "demo"
    for bad in ("bird=1", "turns=x", "turns=0"):
        with pytest.raises(ConfigError, match=r"bird|turns"):
            _made(bad, 512, 0)
    wrong = subprocess.run(
        [*command, "--pages", "many"], capture_output=True, timeout=PATIENCE, check=False
    )
    assert wrong.returncode == 2 and b"pages" in wrong.stderr
