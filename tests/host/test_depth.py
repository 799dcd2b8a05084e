# SPDX-License-Identifier: Apache-2.0
"""Choosing the depth of rounds: near the best fixed one, whatever the text, load and price."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from freewheel.errors import ConfigError
from freewheel.host import Scheduler
from freewheel.host.costs import Arrived, Pace
from freewheel.host.depth import DepthPolicy
from freewheel.spec import CacheGroup, ShapeLadder, StepShape
from tests.host.device import Device
from tests.host.engine import Setup

DEPTHS = (0, 1, 2, 3, 5)
RUN_AHEAD = 2

PROSE = (0.86, 0.72, 0.6, 0.5, 0.45)
COPY = (0.98, 0.97, 0.96, 0.95, 0.95)
JSON = (0.97, 0.95, 0.93, 0.92, 0.9)
NOISE = (0.15, 0.1, 0.1, 0.1, 0.1)
"""How often the draft at each place is right, where those before it were."""

Price = Callable[[int, int], float]
"""Seconds of a round by batch and depth."""


def cheap(batch: int, depth: int) -> float:
    """A large model, few rows: weights are read once, whatever the width."""
    return 10.0 + 0.4 * depth + 0.01 * batch * (1 + depth)


def dear(batch: int, depth: int) -> float:
    """A tiny model: every draft costs much of a round."""
    return 6.0 + 3.0 * depth + 0.2 * batch


def crowded(batch: int, depth: int) -> float:
    """Many rows: time grows with the positions that are computed."""
    return 4.0 + 1.2 * batch * (1 + depth) + 0.4 * depth


@dataclass
class Job:
    """A request: how its drafts fare, and the tokens that it still wants."""

    name: str
    rates: tuple[float, ...]
    left: int
    rng: random.Random

    def agreed(self, offered: int) -> int:
        for place in range(offered):
            if self.rng.random() >= self.rates[place]:
                return place
        return offered


Phase = tuple[int, list[Job]]
"""Requests one behind another, so many at a time."""


def phase(at_once: int, count: int, tokens: int, *kinds: tuple[float, ...], seed: int = 0) -> Phase:
    jobs = [
        Job(f"{seed}.{n}", kinds[n % len(kinds)], tokens, random.Random(n + 97 * seed))
        for n in range(count)
    ]
    return at_once, jobs


TRACES: dict[str, Callable[[], list[Phase]]] = {
    "prose": lambda: [phase(1, 6, 400, PROSE)],
    "copy": lambda: [phase(1, 8, 400, COPY)],
    "json": lambda: [phase(1, 8, 400, JSON)],
    "noise": lambda: [phase(1, 8, 400, NOISE)],
    "eight of prose": lambda: [phase(8, 24, 300, PROSE)],
    "mixed": lambda: [phase(4, 24, 300, PROSE, COPY, JSON, NOISE)],
    "changing load": lambda: [
        phase(rows, 2 * rows, 400, PROSE, JSON, COPY, seed=turn)
        for turn, rows in enumerate((1, 8, 2, 6, 1, 4))
    ],
}
PRICES = {"cheap": cheap, "dear": dear, "crowded": crowded}


class Engine:
    """Rounds by price, letters `RUN_AHEAD` rounds late."""

    def __init__(self, price: Price, fixed: int | None, noise: float) -> None:
        self.price, self.fixed, self.noise = price, fixed, noise
        self.policy = DepthPolicy(DEPTHS, 3, RUN_AHEAD + 2)
        for shape in ShapeLadder.build(8, 3, (64,), 1, DEPTHS).decode:
            self.policy.took_empty(shape, 0.9 * price(shape.batch, shape.depth))
        self.pace, self.rng = Pace(), random.Random(5)
        self.clock = self.total = 0.0
        self.letters: list[tuple[StepShape, float, list[tuple[str, int, int, int]]]] = []
        self.drafts: dict[str, int] = {}

    def round(self, jobs: list[Job]) -> None:
        """One round of all these, and the letter that is due."""
        batch = next(b for b in (1, 2, 4, 8) if b >= len(jobs))
        depth = self.fixed
        if depth is None:
            depth = self.policy.choose(StepShape(batch, 1, 0), [job.name for job in jobs])
        spent = self.price(batch, depth)
        self.total += spent
        self.clock += spent * (1 + self.noise * self.rng.uniform(-1, 1))
        told: list[tuple[str, int, int, int]] = []
        for job in jobs:
            offered = min(self.drafts.get(job.name, 3), depth)
            agreed = job.agreed(offered)
            self.drafts[job.name] = depth
            job.left -= 1 + agreed
            told.append((job.name, offered, agreed, job.left))
        self.letters.append((StepShape(batch, 1 + depth, depth), self.clock, told))
        if len(self.letters) > RUN_AHEAD:
            self.read()

    def read(self) -> None:
        shape, at, told = self.letters.pop(0)
        if self.fixed is not None:
            return
        took = self.pace.letter(shape, (letter[0] for letter in self.letters), Arrived(at))
        if took is not None:
            self.policy.took(shape, *took)
        for name, offered, agreed, left in told:
            self.policy.count(name, offered, agreed, left)


def seconds(trace: list[Phase], price: Price, fixed: int | None, noise: float = 0.0) -> float:
    """What a trace takes, with a depth that is fixed or chosen."""
    engine = Engine(price, fixed, noise)
    for at_once, jobs in trace:
        waiting, running = list(jobs), list[Job]()
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.pop(0))
            engine.round(running)
            for job in [job for job in running if job.left <= 0]:
                running.remove(job)
                engine.policy.forget(job.name)
    return engine.total


@cache
def against_best(trace: str, price: str) -> float:
    """Time with a depth that is chosen, by that with the fixed one that is best for the trace, as
    is known only afterwards."""
    best = min(seconds(TRACES[trace](), PRICES[price], depth) for depth in DEPTHS)
    return seconds(TRACES[trace](), PRICES[price], None, noise=0.1) / best


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("trace", TRACES)
def test_choosing_costs_little(trace: str, price: str) -> None:
    """Times of rounds vary by a fifth here, and drafts by chance alone: there is most to learn and
    least to gain."""
    assert against_best(trace, price) <= 1.05


def test_choosing_costs_a_hundredth_on_average() -> None:
    every = [against_best(trace, price) for trace in TRACES for price in PRICES]
    assert sum(every) / len(every) <= 1.01


def test_a_choice_is_a_function_of_what_was_said_before() -> None:
    def choices() -> list[int]:
        policy, rng = DepthPolicy(DEPTHS, 3, 4), random.Random(1)
        made: list[int] = []
        for turn in range(600):
            depth = policy.choose(StepShape(2, 1, 0), ["a", f"b{turn // 100}"])
            policy.took(StepShape(2, 1 + depth, depth), rng.uniform(1, 1 + depth))
            policy.count("a", depth, rng.randint(0, depth), 99)
            made.append(depth)
        return made

    assert choices() == choices() and len(set(choices())) > 1


def test_what_was_never_timed_is_judged_by_rounds_without_rows() -> None:
    policy = DepthPolicy(DEPTHS, 3, 4)
    for depth in DEPTHS:
        policy.took_empty(StepShape(1, 1 + depth, depth), 1.0 + 9.0 * depth)
    policy.took(StepShape(1, 4, 3), 30.0)
    for _ in range(4):
        policy.count("row", 3, 3, 99)
    assert policy.choose(StepShape(1, 1, 0), ["row"]) == 0


def test_rows_of_which_a_round_decides_one_token_want_no_drafts() -> None:
    policy = DepthPolicy(DEPTHS, 3, 4)
    for depth in DEPTHS:
        policy.took(StepShape(8, 1 + depth, depth), 1.0 + 0.2 * depth)
    for _ in range(9):
        policy.count("row", 3, 3, 99)
    assert policy.choose(StepShape(8, 1, 0), ["row"]) > 0
    chosen = [policy.choose(StepShape(8, 1, 0), ["row"], others=7) for _ in range(8)]
    assert chosen[-1] == 0


def told(policy: DepthPolicy, batch: int, price: Callable[[int], float]) -> None:
    for depth in DEPTHS:
        policy.took_empty(StepShape(batch, 1 + depth, depth), price(depth))


def test_a_request_that_rounds_in_flight_end_wants_no_drafts() -> None:
    policy = DepthPolicy(DEPTHS, 3, 4)
    told(policy, 1, lambda depth: 1.0 + 0.1 * depth)
    for left in (40, 36, 32):
        policy.count("row", 3, 3, left)
    assert policy.choose(StepShape(1, 1, 0), ["row"]) > 0
    policy.count("row", 3, 3, 4)
    assert policy.choose(StepShape(1, 1, 0), ["row"]) == 0


def test_what_deeper_drafts_are_worth_is_known_without_any() -> None:
    policy = DepthPolicy(DEPTHS, 1, 4)
    told(policy, 1, lambda depth: 1.0 + 0.4 * depth)
    for _ in range(30):
        policy.count("good", 1, 1, 99)
    for _ in range(30):
        policy.count("bad", 1, 0, 99)
    assert policy.choose(StepShape(1, 1, 0), ["good"]) == 5
    assert policy.choose(StepShape(1, 1, 0), ["bad"]) == 0


def test_a_host_that_is_slower_than_the_device_makes_drafts_free() -> None:
    policy = DepthPolicy(DEPTHS, 1, 4)
    told(policy, 1, lambda depth: 1.0 + 0.5 * depth)
    policy.took(StepShape(1, 2, 1), 6.0, 5.9)
    for _ in range(9):
        policy.count("row", 1, 1, 99)
        policy.count("row", 1, 0, 99)
    assert policy.choose(StepShape(1, 1, 0), ["row"]) == 5


def test_a_request_whose_drafts_are_wrong_counts_as_much_as_one_whose_drafts_are_right() -> None:
    """Two rows: the most tokens a second come with five drafts, the shortest wait for a token with
    none."""
    policy = DepthPolicy((0, 5), 5, 4)
    policy.took_empty(StepShape(2, 1, 0), 1.0)
    policy.took_empty(StepShape(2, 6, 5), 2.4)
    for _ in range(60):
        policy.count("right", 5, 5, 99)
        policy.count("wrong", 5, 0, 99)
    for _ in range(8):
        policy.choose(StepShape(2, 1, 0), ["right", "wrong"])
    assert policy.choose(StepShape(2, 1, 0), ["right", "wrong"]) == 0


def many(policy: DepthPolicy, count: int) -> None:
    """So many requests are in its rounds."""
    policy.choose(StepShape(count, 1, 0), [f"row {n}" for n in range(count)])


@pytest.mark.parametrize("count", [4, 8, 13, 32])
@pytest.mark.parametrize("period", range(1, 9))
def test_letters_of_many_requests_are_not_all_read_and_nobody_s_never(
    count: int, period: int
) -> None:
    """Whoever takes part in every so-many-th round alone is heard as often as others."""
    policy, stride = DepthPolicy(DEPTHS, 3, 4), 1 + count // 4
    many(policy, count)
    heard = [policy.listens(n) for n in range(840)]
    gaps = [len(gap) + 1 for gap in "".join(".#"[one] for one in heard).split("#")]
    assert max(gaps) <= 5 * stride / 3
    for phase in range(period):
        own = heard[phase::period]
        assert abs(own.count(True) - len(own) / stride) <= 6
    many(policy, 1)
    assert all(policy.listens(n) for n in range(840, 900))


def test_all_copies_of_a_model_hear_of_the_same_rounds() -> None:
    alone, fleet = DepthPolicy(DEPTHS, 3, 4), DepthPolicy(DEPTHS, 3, 4)
    for policy in (alone, fleet):
        many(policy, 8)
    for n in range(60):
        assert [fleet.listens(n) for _ in range(4)] == [alone.listens(n)] * 4


def test_prompts_between_rounds_that_decode_keep_nobody_from_being_heard() -> None:
    """One of every two letters is of a prompt, as with requests that keep coming."""
    asked: list[int] = []

    class Noting(DepthPolicy):
        def listens(self, round_id: int) -> bool:
            asked.append(round_id)
            return super().listens(round_id)

    setup = Setup(rows=6, max_batch=6, widths=(9,), prefill_batch=1, depth=3, context_len=200)
    ladder = ShapeLadder.build(6, 3, (9,), 1, (0, 3))
    scheduler = Scheduler(
        ladder, setup.groups, (1001,), 7, 200, 220, 0, policy=Noting((0, 3), 3, RUN_AHEAD + 2)
    )
    device = Device(setup.groups, 220, random.Random(1))
    for n in range(5):
        scheduler.add(setup.request(f"{n}", 6, max_tokens=150))
    scheduler.add(setup.request("long", 199, max_tokens=1))
    decoding: list[int] = []
    prompts = 0
    while not scheduler.idle:
        plan = scheduler.plan()
        assert plan is not None
        prompts += plan.shape.for_prompts
        decoding += [] if plan.shape.for_prompts else [plan.round_id]
        scheduler.collect(device.execute(plan))
    assert asked == decoding and prompts > 20


def test_a_request_near_its_end_is_known_between_letters_that_are_read() -> None:
    policy = DepthPolicy(DEPTHS, 3, 4)
    told(policy, 1, lambda depth: 1.0 + 0.1 * depth)
    for _ in range(12):
        policy.count("row", 3, 3, 99)
    many(policy, 8)
    letters = itertools.count()
    while not policy.listens(next(letters)):
        pass
    policy.count("row", 3, 3, 14)
    assert policy.choose(StepShape(1, 1, 0), ["row"]) > 0
    many(policy, 8)
    assert not any(policy.listens(next(letters)) for _ in range(2))
    assert policy.choose(StepShape(1, 1, 0), ["row"]) == 0


def test_what_was_known_of_an_end_when_more_letters_were_passed_over_does_not_count() -> None:
    """A request of many goes on alone, far from its end: its drafts are worth having."""
    policy = DepthPolicy(DEPTHS, 3, 4)
    told(policy, 1, lambda depth: 1.0 + 0.1 * depth)
    many(policy, 32)
    for left in range(80, 19, -1):
        policy.count("row", 3, 3, left)
    assert all(not policy.listens(n) for n in (2, 3, 5))
    policy.choose(StepShape(1, 1, 0), ["row"])
    policy.count("row", 3, 3, 19)
    assert policy.choose(StepShape(1, 1, 0), ["row"]) > 0
    assert not policy._ending


def test_nothing_is_remembered_of_requests_that_ended_however_their_letters_were_read() -> None:
    policy, rng = DepthPolicy(DEPTHS, 3, 4), random.Random(4)
    live: list[str] = []
    for n in range(3000):
        live += [f"{n}"] if rng.random() < 0.4 and len(live) < 24 else []
        policy.choose(StepShape(32 if len(live) > 8 else 8, 1, 0), live)
        hears = policy.listens(n)
        for name in list(live):
            if rng.random() < 0.02:
                policy.forget(name)  # whether its last letter is read or not
                live.remove(name)
            elif hears:
                policy.count(name, 3, rng.randint(0, 3), rng.randint(0, 90))
        assert set(policy._ending) | set(policy._acceptance._rows) <= set(live)
    assert len(policy._loads) == 2


def test_a_steady_load_is_judged_every_sixteenth_round(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, asked = DepthPolicy(DEPTHS, 3, 4), [0]
    told(policy, 2, lambda depth: 1.0 + 0.1 * depth)
    waits = policy._acceptance.waits

    def counted(rows: Sequence[str]) -> list[float]:
        asked[0] += 1
        return waits(rows)

    monkeypatch.setattr(policy._acceptance, "waits", counted)
    for _ in range(320):
        depth = policy.choose(StepShape(2, 1, 0), ["a", "b"])
        policy.took(StepShape(2, 1 + depth, depth), 1.0 + 0.1 * depth)
        policy.count("a", depth, depth, 99)
    assert asked[0] <= 320 / 16 + 8


def test_rounds_with_more_to_do_are_guessed_by_those_that_only_choose() -> None:
    policy = DepthPolicy(DEPTHS, 3, 4)
    told(policy, 1, lambda depth: 1.0 + 9.0 * depth)
    for _ in range(4):
        policy.count("row", 3, 3, 99)
    assert policy.choose(StepShape(1, 1, 0, extras=1), ["row"]) == 0


def test_only_rounds_among_their_like_are_timed() -> None:
    pace, one, other = Pace(), StepShape(1, 2, 1), StepShape(1, 4, 3)
    assert pace.letter(one, [one], Arrived(1.0)) is None
    assert pace.letter(one, [one, one], Arrived(3.0, 0.5)) == (2.0, 0.5)
    assert pace.letter(one, [one, other], Arrived(5.0)) is None
    assert pace.letter(other, [other], Arrived(6.0)) is None
    assert pace.letter(other, [], Arrived(6.5, 0.25)) == (0.5, 0.25)
    assert pace.letter(other, [], None) is None


def test_a_ladder_of_several_depths_needs_somebody_to_choose() -> None:
    ladder = ShapeLadder.build(2, 3, (64,), 1, DEPTHS)
    group = CacheGroup("history", 4, 1, None, ())
    with pytest.raises(ConfigError, match="nobody to choose"):
        Scheduler(ladder, (group,), (9,), 3, 16, 16, 0)
    with pytest.raises(ConfigError, match="chooses among"):
        Scheduler(ladder, (group,), (9,), 3, 16, 16, 0, policy=DepthPolicy((0, 3), 3, 2))


@pytest.mark.parametrize("told", [True, False])
def test_a_clock_that_is_too_coarse_to_see_a_round_stops_nobody(told: bool) -> None:
    policy, load = DepthPolicy(DEPTHS, 1, RUN_AHEAD + 2), StepShape(1, 1, 0)
    for depth in DEPTHS if told else ():
        policy.took_empty(StepShape(1, 1 + depth, depth), 0.0)
    for _ in range(60):
        depth = policy.choose(load, ["a"])
        assert depth in DEPTHS
        policy.count("a", depth, depth, 1000)
        policy.took(StepShape(1, 1 + depth, depth), 0.0, 0.0)
