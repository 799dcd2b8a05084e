# SPDX-License-Identifier: Apache-2.0
"""Pages run short: who waits, who is preempted, and what a row holds at each step."""

from __future__ import annotations

import random

import pytest

from freewheel.host import Request, RequestState
from freewheel.spec import StepPlan
from tests.host.device import Device, solo
from tests.host.engine import Engine, Setup, history, window


class Scripted(random.Random):
    """Drafts agree as the script says, again and again."""

    def __init__(self, *agreeing: int):
        super().__init__(0)
        self.script = agreeing
        self.turn = -1

    def randint(self, a: int, b: int) -> int:
        self.turn += 1
        return max(a, min(self.script[self.turn % len(self.script)], b))


def test_rewinding_across_a_page_leaves_the_page_list_with_its_one_owner() -> None:
    """Lengths go 15, 19, 16: the drafts reach into pages that are then not advanced to."""
    setup = Setup(run_ahead=0, depth=3, groups=(history(4),), pages=(12,), rows=2)
    engine = Engine(setup, Scripted(0, 0, 3, 0))
    request = engine.add(setup.request("a", 15, max_tokens=20))
    held: list[int] = []
    while not engine.scheduler.idle:
        engine.step()
        listed = [page for (_, _), page in sorted(engine.tables[1].items())]
        if request.finish is None:
            assert listed == list(request.pages[0]) == sorted(request.pages[0])
            assert len(listed) <= history(4).pages_for(request.upper + 7)
            held.append(len(listed))
    assert held == sorted(held)
    assert request.output == solo(request)[0]


def test_a_row_holds_what_its_next_round_may_write_and_no_more() -> None:
    for run_ahead in range(4):
        setup = Setup(run_ahead=run_ahead, groups=(history(1),), row_width=100)
        engine = Engine(setup)
        request = engine.add(setup.request("a", 5, max_tokens=None))
        while engine.launch() is not None:
            before = request.upper - 4 if request.upper > 5 else 0
            expected = before + 7 if before else 5 + 3
            assert len(request.pages[0]) == expected
        engine.drain()
        assert max(w.column for p in engine.plans for w in p.page_writes) < 63 + 7


def test_a_prompt_in_a_wide_rectangle_holds_no_pages_for_the_padding() -> None:
    setup = Setup(widths=(64,), groups=(history(1),), context_len=100, row_width=100)
    engine = Engine(setup)
    request = engine.add(setup.request("a", 5))
    engine.launch()
    assert len(request.pages[0]) == 5 + 3


def test_pages_behind_the_window_are_freed_as_letters_come() -> None:
    setup = Setup(groups=(history(4), window(4, 6)), pages=(40, 40), context_len=120, row_width=120)
    engine = Engine(setup)
    request = engine.add(setup.request("a", 30, max_tokens=80))
    while engine.step() is not None and request.finish is None:
        assert request.tenancy is not None
        assert request.tenancy.spans[1].first == max(0, request.lower - 6) // 4
        assert len(request.pages[1]) <= (6 + 3 * 4 + 7) // 4 + 2
    engine.drain()
    assert request.output == solo(request)[0]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("run_ahead", [0, 2, 3])
def test_two_requests_in_a_pool_for_one_and_a_half_both_finish(depth: int, run_ahead: int) -> None:
    setup = Setup(depth=depth, run_ahead=run_ahead, pages=(17,), rows=2)
    engine = Engine(setup)
    first, second = (engine.add(setup.request(name, 8, max_tokens=36)) for name in "ab")
    engine.drain()
    assert (first.stats.preemptions, second.stats.preemptions > 0) == (0, True)
    for request in (first, second):
        assert request.output == solo(request)[0] == engine.tokens(request)
        assert len(engine.endings(request)) == 1


def test_late_letters_of_a_preempted_stay_are_dropped_once_and_counted() -> None:
    dropped = 0
    for seed in range(30):
        setup = Setup(run_ahead=3, pages=(20,), rows=3, prefill_batch=4)
        engine = Engine(setup, random.Random(seed))
        requests = [engine.add(setup.request(f"{n}", 6, max_tokens=40)) for n in range(3)]
        engine.drain()
        sent = sum(emitted(setup, engine.plans, random.Random(seed)))
        assert sent == sum(len(r.output) + r.stats.dropped for r in requests)
        assert [r.output for r in requests] == [solo(r)[0] for r in requests]
        dropped += sum(r.stats.dropped for r in requests)
    assert dropped > 0


def emitted(setup: Setup, plans: list[StepPlan], rng: random.Random) -> list[int]:
    """Tokens that each of these rounds brings, on a device that runs them again."""
    device = Device(setup.groups, setup.row_width, rng)
    return [sum(len(row.tokens) for row in device.execute(plan).rows) for plan in plans]


def test_a_resumed_request_computes_prompt_and_output_anew() -> None:
    engine, victim = pressed(prefix_cache=False)
    while victim.stats.preemptions == 0:
        engine.step()
    assert victim.state is RequestState.WAITING
    known = victim.known
    assert known > len(victim.prompt)
    seen = len(engine.plans)
    engine.drain()
    row_plans = [
        (admission, feed)
        for plan in engine.plans[seen:]
        for admission, feed in zip(plan.admissions, plan.feeds, strict=True)
        if feed is not None
    ]
    admission, first = row_plans[0]
    assert admission is not None
    assert (admission.known, admission.computed, admission.limit) == (known, 0, victim.limit)
    tokens = (*victim.prompt, *victim.output)
    for _, feed in row_plans:
        assert feed.tokens == tokens[feed.start : feed.start + len(feed.tokens)]
        assert feed.start + len(feed.tokens) <= known
    assert first.start == 0


def pressed(prefix_cache: bool = True) -> tuple[Engine, Request]:
    """Two requests of which the second will lose its place."""
    setup = Setup(pages=(17,), rows=2, widths=(9,), run_ahead=1, prefix_cache=prefix_cache)
    engine = Engine(setup)
    engine.add(setup.request("a", 8, max_tokens=36))
    return engine, engine.add(setup.request("b", 8, max_tokens=36))


def test_a_preempted_request_is_served_before_those_that_came_later() -> None:
    engine, victim = pressed()
    later = engine.add(engine.setup.request("c", 8, max_tokens=36))
    while victim.stats.preemptions == 0:
        engine.step()
    roster = engine.scheduler.roster
    assert list(roster.waiting) == [victim, later]
    engine.drain()
    assert later.output == solo(later)[0]


def test_admission_leaves_running_prompts_the_pages_to_finish() -> None:
    """A long prompt has computed one chunk; a second one would fit now, but not beside it."""
    setup = Setup(pages=(20,), widths=(9,), rows=3, prefill_batch=2, run_ahead=0)
    engine = Engine(setup)
    first = engine.add(setup.request("a", 50, max_tokens=4))
    engine.step()
    second = engine.add(setup.request("b", 24, max_tokens=4))
    pool = engine.pools[0]
    assert pool.free > setup.groups[0].pages_for(24 + 7)
    engine.step()
    assert second.state is RequestState.WAITING
    engine.drain()
    assert first.stats.preemptions == second.stats.preemptions == 0


def test_admission_leaves_each_decoding_request_a_page() -> None:
    """The newcomer needs 4 pages, and its neighbour may soon need one more than its 4."""
    for pages, joins in ((8, False), (9, True)):
        setup = Setup(pages=(pages,), depth=0, rows=2, run_ahead=0, widths=(9, 16))
        engine = Engine(setup)
        first = engine.add(setup.request("a", 15, max_tokens=10))
        engine.step()
        assert len(first.pages[0]) == 4
        second = engine.add(setup.request("b", 15, max_tokens=10))
        engine.step()
        engine.step()
        assert (second.state is not RequestState.WAITING) == joins


def test_the_head_of_the_queue_is_not_overtaken_by_a_smaller_request() -> None:
    setup = Setup(pages=(17,), rows=3, context_len=60)
    engine = Engine(setup)
    engine.add(setup.request("a", 30, max_tokens=20))
    engine.step()
    large = engine.add(setup.request("b", 40, max_tokens=4))
    small = engine.add(setup.request("c", 2, max_tokens=2))
    engine.drain()
    admitted = [a.seed for plan in engine.plans for a in plan.admissions if a is not None]
    assert admitted.index(large.seed) < admitted.index(small.seed)


def test_five_hundred_requests_with_aborts_leak_nothing() -> None:
    setup = Setup(groups=(history(4), window(4, 8)), pages=(30, 24), rows=4, prefill_batch=4)
    engine = Engine(setup)
    rng = random.Random(5)
    for number in range(500):
        prompt, tokens = rng.randint(1, 20), rng.randint(1, 20)
        request = engine.add(setup.request(f"{number}", prompt, tokens))
        engine.step()
        if number % 10 == 9:
            engine.abort(request)
    engine.drain()
