# SPDX-License-Identifier: Apache-2.0
"""Blocks in host memory: found again there, waited for, and never in anybody's way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from freewheel.host import Request, RequestState
from freewheel.host.moves import Moves
from freewheel.host.tier import HostTier
from freewheel.spec import SlotPlan, Way
from tests.host.device import VOCABULARY, solo
from tests.host.engine import Engine, Setup, history, window
from tests.host.test_prefix import TOKENS, run
from tests.host.test_schedules import FamilyTrial

LEFT, RIGHT = TOKENS[:30], TOKENS[30:60]


def tiered(slots: int = 50, **options: Any) -> Engine:
    """A device that holds one long prompt at a time."""
    usual: dict[str, Any] = {"pages": (13,), "rows": 2, "context_len": 44, "row_width": 44}
    return Engine(Setup(**(usual | options), host_slots=slots))


def moves(engine: Engine) -> Moves:
    found = engine.scheduler.roster.reservations.moves
    assert found is not None
    return found


def test_what_the_device_had_no_room_for_is_found_in_host_memory() -> None:
    engine = tiered()
    assert run(engine, "left", LEFT).stats.host_tokens == 0
    run(engine, "right", RIGHT)
    again = run(engine, "left again", LEFT)
    assert (again.stats.cached_tokens, again.stats.host_tokens) == (28, 16), "a part never left"
    once_more = run(engine, "and again", LEFT)
    assert (once_more.stats.cached_tokens, once_more.stats.host_tokens) == (28, 0)


def test_without_slots_nothing_moves() -> None:
    engine = tiered(slots=0)
    run(engine, "left", LEFT)
    run(engine, "right", RIGHT)
    assert run(engine, "left again", LEFT).stats.cached_tokens < 28
    assert engine.scheduler.roster.reservations.moves is None


def test_a_request_waits_for_its_pages_while_others_go_on() -> None:
    engine = tiered()
    run(engine, "left", LEFT)
    run(engine, "right", RIGHT)
    waits = engine.add(engine.setup.request("left again", LEFT, 3))
    other = engine.add(engine.setup.request("other", TOKENS[3:6], 6))
    while not other.output:
        while engine.launch() is not None:
            pass
        engine.collect()
    assert waits.state is RequestState.WAITING and other.output
    assert [transfer.way for transfer in engine.moving].count(Way.IN) == 1
    engine.drain()
    assert waits.stats.host_tokens == 16
    assert all(request.output == solo(request)[0] for request in (waits, other))


def test_those_who_want_the_same_pages_wait_for_one_copy() -> None:
    engine = tiered(rows=3, prefill_batch=3)
    run(engine, "left", LEFT)
    run(engine, "right", RIGHT)
    both = [engine.add(engine.setup.request(f"{n}", LEFT, 3)) for n in range(2)]
    engine.launch()
    assert [transfer.way for transfer in engine.moving].count(Way.IN) == 1
    engine.drain()
    assert all(r.stats.cached_tokens == 28 and r.output == solo(r)[0] for r in both)


def test_a_damaged_block_is_computed_and_those_before_it_are_used() -> None:
    engine = tiered()
    run(engine, "left", LEFT)
    run(engine, "right", RIGHT)
    keys = moves(engine)._prefix.keys(engine.setup.request("keys", LEFT))
    kept = moves(engine).tier.find(keys[4])
    assert kept is not None
    engine.device.slots[kept.slot].label = -1
    assert run(engine, "left again", LEFT).stats.cached_tokens == 16
    assert moves(engine).counts.damaged == 1


def test_a_forgotten_block_is_not_found_in_host_memory_nor_what_follows_it() -> None:
    engine = tiered()
    first = run(engine, "left", LEFT)
    prefix = engine.scheduler.roster.reservations.prefix
    assert prefix is not None and len(moves(engine).tier) == 8
    moves(engine).forget(prefix.keys(first)[2:3], [])
    assert len(moves(engine).tier) == 2
    prefix.clear()
    assert len(moves(engine).tier) == len(prefix) == 0
    assert run(engine, "left again", LEFT).stats.cached_tokens == 0


def test_a_preempted_request_has_its_pages_back_from_host_memory() -> None:
    computed = {}
    for slots in (0, 50):
        engine = tiered(slots, pages=(16,), context_len=60, row_width=60, widths=(9,))
        requests = [engine.add(engine.setup.request(n, 14, max_tokens=40)) for n in "ab"]
        engine.drain()
        assert sum(request.stats.preemptions for request in requests) > 0
        assert all(request.output == solo(request)[0] for request in requests)
        computed[slots] = sum(request.stats.prefill_rounds for request in requests)
    assert computed[50] < computed[0]


def test_a_window_moves_with_the_history() -> None:
    engine = tiered(groups=(history(), window(4, 6)), pages=(14, 12), widths=(9,))
    run(engine, "left", LEFT)
    run(engine, "right", RIGHT)
    again = run(engine, "left again", LEFT)
    assert again.stats.host_tokens > 0
    plan = SlotPlan.of(engine.setup.groups, 4)
    assert plan.places == (1, 2)


def test_slots_go_to_the_block_used_last_and_wait_for_their_copies() -> None:
    tier = HostTier(2)
    one, two = tier.take(b"1", (), True), tier.take(b"2", [b"1"], True)
    assert one is not None and two is not None and tier.take(b"3", [b"2", b"1"], True) is None
    one.ready = two.ready = True
    tier.touch(one)
    three = tier.take(b"3", [b"2", b"1"], True)
    assert three is not None and tier.find(b"2") is None and tier.find(b"1") is one
    one.readers = 1
    tier.forget(b"1")
    assert (len(tier), tier.free) == (0, 0), "one is read, the other is written"
    one.readers, three.ready = 0, True
    tier.settled(one)
    tier.settled(three)
    assert tier.free == 2 and tier.conserves()


class BusyTrial(FamilyTrial):
    """The same few prompts again and again, on a device that holds few of them."""

    def new_setup(self) -> Setup:
        return replace(super().new_setup(), host_slots=self.rng.choice([2, 10, 100]))

    def new_request(self) -> Request:
        request = super().new_request()
        rng = random.Random(self.rng.randrange(3))
        tokens = tuple(rng.randrange(VOCABULARY) for _ in range(self.setup.context_len))
        cut = self.rng.randint(1, self.setup.context_len - 8)
        again = self.setup.request(request.id, tokens[:cut], request.params.max_tokens)
        again.priority, again.tenant = request.priority, request.tenant
        return again


class BusyStreamTrial(BusyTrial):
    family = "v4"


@pytest.mark.parametrize("trial", [BusyTrial, BusyStreamTrial], ids=["v32", "v4"])
def test_prompts_that_come_again_and_again_give_their_own_tokens(trial: type[BusyTrial]) -> None:
    fetched = 0
    for seed in range(10):
        one = trial(seed)
        one.run()
        one.check()
        fetched += any(request.stats.host_tokens for request in one.requests)
    assert fetched >= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("trial", [BusyTrial, BusyStreamTrial], ids=["v32", "v4"])
def test_two_thousand_schedules_of_prompts_that_come_again(trial: type[BusyTrial]) -> None:
    for seed in range(1000, 3000):
        one = trial(seed)
        one.run()
        one.check()
