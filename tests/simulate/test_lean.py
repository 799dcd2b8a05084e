# SPDX-License-Identifier: Apache-2.0
"""Rounds that are counted, not planned, give the figures of a run that plans every one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from freewheel.config import EngineConfig
from freewheel.errors import ConfigError, FreewheelError
from freewheel.simulate import Call, Outcome, Replay, RoundCost, Simulation, Trace, simulation
from freewheel.simulate.lean import Stride

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
COSTS = (RoundCost(), RoundCost(1.0, 0, 0), RoundCost(0.01, 1e-5, 1e-7))


def calls(rng: random.Random) -> list[Call]:
    """Rare and crowded, long and of one token, alike at the beginning and not."""
    now, rate, found = 0.0, rng.choice([0.5, 3, 20, 200]), list[Call]()
    known: list[tuple[int, ...]] = [()]
    for _ in range(rng.randint(10, 60)):
        now += rng.expovariate(rate)
        prompt = rng.choice(
            [1, 63, 64, 65, 512, 513, 1024, rng.randint(1, 300), rng.randint(1, 3000)]
        )
        answer = rng.choice([1, 2, 3, 64, 65, rng.randint(1, 300), rng.randint(1, 900)])
        said = prompt + answer if rng.random() < 0.5 else prompt
        blocks = list(rng.choice(known)[: rng.randint(0, 6)])[: -(-said // 512)]
        blocks += [rng.randint(0, 10**9) for _ in range(-(-said // 512) - len(blocks))]
        known.append(tuple(blocks))
        priority, tenant = rng.choice([0, 0, 0, 1, -1]), rng.choice(["", "a", "b"])
        found.append(Call(now, prompt, answer, tuple(blocks), priority, tenant))
    return found


def planned(rng: random.Random, trace: Trace, seed: int) -> Simulation:
    rows = rng.choice([1, 2, 8, 32])
    accept = rng.choice([(), (0.7,), (0.8, 0.6, 0.45), (1.0,) * 5])
    config = EngineConfig(
        model=str(CONFIGS / rng.choice(["v32_tp8shard.json", "v4flash_tp8shard.json"])),
        load_format="dummy",
        speculate=len(accept),
        max_batch=rows,
        prefill_batch=min(rows, rng.choice([1, 2, 4])),
        chunk=rng.choice([256, 1024]),
        cache_bytes=1 << 35,
        run_ahead=rng.choice([0, 1, 2, 3]),
        prefill_share=rng.choice([0.2, 0.5, 0.8]),
        prefix_cache=rng.random() < 0.85,
        context_len=rng.choice([None, 3400]),
    )
    pages = rng.choice([None, 20, 40, 60, 300, 0])
    return simulation(config, trace, accept, rng.choice(COSTS), pages, seed)


def outcome(replay: Replay) -> Outcome | str:
    try:
        return replay.run()
    except FreewheelError as error:
        return str(error)


def differs(seed: int) -> Outcome | None:
    """Where it does not, what happened."""
    rng = random.Random(seed)
    trace = Trace(tuple(calls(rng)))
    plan = planned(rng, trace, seed)
    every, lean = (outcome(Replay(plan, trace, every_round=one)) for one in (True, False))
    assert every == lean, f"seed {seed}"
    return every if isinstance(every, Outcome) else None


def test_every_figure_is_that_of_a_run_that_plans_every_round() -> None:
    found = [one for seed in range(24) if (one := differs(seed)) is not None]
    assert len(found) >= 20
    assert sum(one.decode_rounds for one in found) > 5000


@pytest.mark.parametrize("seed", [1085, 1125, 1133, 1166, 1555, 2170])
def test_a_row_that_sat_out_or_has_just_begun_stops_in_time(seed: int) -> None:
    """Its latest rounds are counted from their own first one, behind letters of earlier ones; what
    it gives back waits for the last of them."""
    assert differs(seed) is not None


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_so_it_is_where_rows_lose_their_pages_to_others(run_ahead: int) -> None:
    rng = random.Random(run_ahead)
    trace = Trace(
        tuple(
            Call(n / 50, rng.randint(50, 250), rng.randint(100, 700), (n % 4,), n % 2)
            for n in range(24)
        )
    )
    config = EngineConfig(
        model=str(CONFIGS / "v32_tp8shard.json"),
        load_format="dummy",
        speculate=2,
        max_batch=8,
        run_ahead=run_ahead,
        context_len=1024,
    )
    plan = simulation(config, trace, (0.8, 0.5), RoundCost(), 20)
    every, lean = (Replay(plan, trace, every_round=one).run() for one in (True, False))
    assert every == lean and every.preemptions > 10


def of_depth(depth: int, shares: tuple[float, ...]) -> tuple[Outcome, Outcome]:
    """Every round planned, and not."""
    trace = Trace(tuple(Call(n / 4, 100 + n, 200, (n,)) for n in range(12)))
    config = EngineConfig(
        model=str(CONFIGS / "v32_tp8shard.json"),
        load_format="dummy",
        speculate=depth,
        max_batch=4,
        context_len=1024,
    )
    plan = simulation(config, trace, shares, RoundCost(), 100)
    return Replay(plan, trace, every_round=True).run(), Replay(plan, trace).run()


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_shares_of_more_drafts_than_are_made_count_for_nothing(depth: int) -> None:
    shares = (0.8, 0.6, 0.45)
    every, lean = of_depth(depth, shares)
    assert every == lean == of_depth(depth, shares[:depth])[1]
    expected = 8e-3 / (1 + sum(shares[:depth]))  # of rounds that take 8 ms at least
    assert expected < sum(lean.per_token) / len(lean.per_token) < 1.2 * expected


def test_drafts_without_a_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="accept: 3 given for 4 drafts"):
        of_depth(4, (0.8, 0.6, 0.45))


@pytest.mark.exhaustive
def test_every_figure_of_a_thousand_traces() -> None:
    for seed in range(1000, 2000):
        differs(seed)


def test_few_rounds_are_planned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(tuple(Call(float(n), 600, 400, (n, 10**6 + n)) for n in range(3)))
    config = EngineConfig(
        model=str(CONFIGS / "v32_tp8shard.json"), load_format="dummy", speculate=3, max_batch=8
    )
    plan = simulation(config, trace, (0.8, 0.6, 0.45), RoundCost(), 100)
    replay, asked = Replay(plan, trace), list[bool]()
    inner = replay.scheduler.plan

    def counted():
        found = inner()
        asked.append(found is not None and not isinstance(found, Stride))
        return found

    monkeypatch.setattr(replay.scheduler, "plan", counted)
    found = replay.run()
    assert asked.count(True) <= 2 * found.prompt_rounds
    assert len(asked) < found.decode_rounds < 400
