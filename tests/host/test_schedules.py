# SPDX-License-Identifier: Apache-2.0
"""Thousands of schedules for the cache groups of both families, near exhaustion.

The device is `tests/host/device.py`: the lengths, page tables, drafts and drafter's rows of real
rounds, and a model whose every token follows from what it reads through its pages. So a wrong page,
column, length, prefix or order shows as a wrong token. What it does not cover is arithmetic of
tensors: `tests/program/test_schedules.py` drives real models.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from freewheel.host import Request
from freewheel.spec import CacheGroup
from tests.host.device import solo
from tests.host.engine import FIELDS, Engine, Setup, history
from tests.host.test_fuzz import pool_pages, random_request
from tests.host.test_prefix import SharedTrial


def miniature_v4() -> tuple[CacheGroup, ...]:
    """The five groups of DeepSeek-V4 with all numbers small: ratios 4 and 8 on blocks of 16."""
    return (
        CacheGroup("window", 4, 1, 8, FIELDS),
        CacheGroup("compressed4", 16, 4, None, FIELDS),
        CacheGroup("tail4", 4, 1, 8, FIELDS, resume=4),
        CacheGroup("compressed8", 16, 8, None, FIELDS),
        CacheGroup("tail8", 8, 1, 8, FIELDS, resume=0),
    )


def family_setup(family: str, rng: random.Random) -> Setup:
    groups = (history(rng.choice([4, 8])),) if family == "v32" else miniature_v4()
    context_len = rng.randint(40, 80) if family == "v32" else rng.randint(60, 110)
    widths = rng.choice([(9,), (9, 16), (12, 24)])
    room = rng.choice([1.0, 1.0, 1.2, 1.6, 3.0, 5.0])
    return Setup(
        depth=rng.choice([0, 1, 3, 7]),
        max_batch=rng.randint(1, 5),
        widths=widths,
        prefill_batch=rng.randint(1, 4),
        groups=groups,
        pages=tuple(pool_pages(g, context_len, widths[-1], room) for g in groups),
        rows=rng.randint(1, 6),
        context_len=context_len,
        row_width=context_len + rng.choice([0, 0, 9]),
        run_ahead=rng.randint(0, 3),
        chunk=rng.choice([None, *widths]),
        prefill_share=rng.choice([0.5, 0.1, 0.9]),
        host_slots=rng.choice([0, 0, 1, 4, 100]),
    )


class FamilyTrial(SharedTrial):
    """A random history of requests that begin alike, with priorities, tenants, aborts and stops."""

    family = "v32"

    def new_setup(self) -> Setup:
        return family_setup(self.family, self.rng)

    def new_request(self) -> Request:
        longer = (self.setup.context_len // 2, self.setup.context_len - 8)
        request = random_request(self.setup, self.rng, len(self.requests), longer)
        request.shows = len(self.requests) % 7 == 3  # its prompt's rounds are its own
        return request


class StreamTrial(FamilyTrial):
    family = "v4"


def run_schedules(trials: type[FamilyTrial], seeds: range) -> Counter[str]:
    """Run and check each; what happened in how many of them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        trial = trials(seed)
        trial.run()
        trial.check()
        stats = [request.stats for request in trial.requests]
        seen["found"] += any(one.cached_tokens for one in stats)
        seen["fetched"] += any(one.host_tokens for one in stats)
        seen["preempted"] += any(one.preemptions for one in stats)
        seen["late"] += any(one.dropped for one in stats)
        seen["aborted"] += bool(trial.aborted)
        seen["stopped"] += bool(trial.cut)
        seen["drafted"] += any(one.agreed for one in stats)
    return seen


@pytest.mark.parametrize("trials", [FamilyTrial, StreamTrial], ids=["v32", "v4"])
def test_every_schedule_gives_the_tokens_of_each_request_alone(trials: type[FamilyTrial]) -> None:
    seen = run_schedules(trials, range(60))
    assert all(
        seen[what] >= 3 for what in "found preempted late aborted stopped drafted".split()
    ), seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("trials", [FamilyTrial, StreamTrial], ids=["v32", "v4"])
def test_two_thousand_schedules_of_each_family(trials: type[FamilyTrial], part: int) -> None:
    run_schedules(trials, range(1000 + 500 * part, 1500 + 500 * part))


def storm(doomed: int, survivors: int, run_ahead: int, seed: int) -> None:
    """Requests end at random tokens, all but some; the last of them all at once."""
    rng = random.Random(seed)
    setup = Setup(
        groups=miniature_v4(),
        pages=(200, 60, 200, 60, 100),
        rows=24,
        max_batch=24,
        prefill_batch=8,
        run_ahead=run_ahead,
    )
    engine = Engine(setup, rng)
    left: dict[str, int] = {}
    live: list[Request] = []
    stay: list[Request] = []
    every = max(1, doomed // survivors)
    for number in range(doomed):
        request = engine.add(setup.request(f"{number}", rng.randint(1, 30), 30))
        left[request.id] = rng.randint(0, 29)
        live.append(request)
        if number % every == 0 and len(stay) < survivors:
            stay.append(engine.add(setup.request(f"stays {number}", rng.randint(1, 30), 30)))
    while len(live) > doomed // 20:
        engine.step()
        gone = [r for r in live if r.finish or len(r.output) >= left[r.id] > 0]
        gone += [r for r in live if not left[r.id] and rng.random() < 0.02]
        for request in gone:
            engine.scheduler.abort(request.id)
        engine.check()
        live = [request for request in live if request.finish is None]
    for request in live:
        engine.scheduler.abort(request.id)
    for _ in range(len(engine.flights)):
        engine.collect()
    kept = [request for request in stay if request.tenancy is not None]
    for group, pool in enumerate(engine.pools):
        assert pool.quarantined == 0
        assert pool.owned == len({page for r in kept for page in r.pages[group]})
    engine.drain(rounds=100_000)
    assert all(request.output == solo(request)[0] for request in stay)


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_a_storm_of_cancels_frees_every_page_with_the_letters_in_flight(run_ahead: int) -> None:
    """At most `run_ahead + 1` rounds: two with one round ahead. Survivors notice nothing."""
    storm(doomed=150, survivors=15, run_ahead=run_ahead, seed=run_ahead)


@pytest.mark.exhaustive
def test_a_storm_of_two_thousand_cancels_leaves_the_survivors_their_tokens() -> None:
    storm(doomed=2000, survivors=100, run_ahead=1, seed=9)
