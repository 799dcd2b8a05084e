# SPDX-License-Identifier: Apache-2.0
"""Several copies of a model go in step: one shape for all, each row and page a copy's own."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.errors import RequestError
from freewheel.host import Fleet, Request
from freewheel.spec import FinishReason, StepPlan, StepResult, Transfer, Way
from tests.host.device import Device, solo
from tests.host.engine import Setup, history


class FleetEngine:
    """A device for each copy; letters come home `late` rounds behind."""

    def __init__(self, setup: Setup, copies: int, seed: int = 0) -> None:
        self.rng = rng = random.Random(seed)
        self.fleet = Fleet([setup.scheduler() for _ in range(copies)], setup.prefill_share)
        self.devices = [Device(setup.groups, setup.row_width, rng) for _ in range(copies)]
        self.moving: list[Transfer] = []
        self.letters: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.finished: dict[str, FinishReason] = {}

    def step(self) -> None:
        plan = self.fleet.plan()
        if plan is not None:
            assert len(plan.each) == len(self.devices)
            assert {one.shape for one in plan.each} == {plan.shape}
            assert any(one.rows or one.table for one in plan.each)
            pairs = zip(self.devices, plan.each, strict=True)
            first, *others = (device.execute(own) for device, own in pairs)
            self.letters.append(StepResult(first.round_id, first.rows, tuple(others)))
            self.plans.append(plan)
        if self.letters and (plan is None or len(self.letters) > self.fleet.run_ahead):
            for update in self.fleet.collect(self.letters.popleft()):
                if update.finish is not None:
                    self.finished[update.request.id] = update.finish
        self.moving += self.fleet.transfers()
        if self.moving and (plan is None or self.rng.random() < 0.5):
            self.move()
        for copy in self.fleet.copies:
            copy.roster.reservations.check()

    def move(self) -> None:
        """Some transfer of some copy ends; now and then its slots hold something else by then."""
        transfer = self.moving.pop(self.rng.randrange(len(self.moving)))
        device = self.devices[transfer.replica]
        if transfer.way is Way.IN and self.rng.random() < 0.2:
            device.slots[transfer.blocks[0].slot].label = -1
        self.fleet.transferred(replace(device.move(transfer), replica=transfer.replica))

    def run(self) -> None:
        while not self.fleet.idle:
            assert len(self.plans) < 1000, "the fleet never ends"
            self.step()


@given(
    copies=st.integers(2, 3),
    pages=st.sampled_from([24, 1000]),
    run_ahead=st.integers(0, 3),
    depth=st.sampled_from([0, 3]),
    slots=st.sampled_from([0, 12]),
    seed=st.integers(0, 999),
)
@settings(max_examples=40, deadline=None)
def test_requests_of_a_fleet_get_the_tokens_that_they_get_alone(
    copies: int, pages: int, run_ahead: int, depth: int, slots: int, seed: int
) -> None:
    """Few pages: requests are preempted. Pools conserve after every round, whatever moves."""
    setup = Setup(
        depth=depth,
        run_ahead=run_ahead,
        groups=(history(4),),
        pages=(pages,),
        rows=3,
        host_slots=slots,
    )
    engine, rng = FleetEngine(setup, copies, seed), random.Random(seed)
    requests: list[Request] = []
    said: list[tuple[int, ...]] = []
    for number in range(9):
        stops = (3, 7) if rng.random() < 0.5 else ()
        prompt = rng.choice(said) if said and rng.random() < 0.5 else rng.randint(1, 40)
        asked = setup.request(f"{seed}.{number}", prompt, rng.randint(1, 16), 0, stops)
        said.append(tuple(asked.prompt))
        requests.append(asked)
        engine.fleet.add(asked)
        for _ in range(rng.randint(0, 4)):
            engine.step()
    engine.run()
    for one in requests:
        assert (one.output, engine.finished[one.id]) == solo(one)


def test_requests_are_dealt_evenly_and_a_copy_without_any_idles() -> None:
    setup = Setup(rows=4)
    engine = FleetEngine(setup, 2)
    engine.fleet.add(setup.request("lone", 12))
    engine.run()
    assert all(not plan.others[0].rows for plan in engine.plans)
    for number in range(6):
        engine.fleet.add(setup.request(f"r{number}", 12))
    assert [copy.live for copy in engine.fleet.copies] == [3, 3]
    engine.run()


def test_a_request_goes_where_its_prefix_is_cached_unless_that_copy_is_busy() -> None:
    setup = Setup(rows=4, prefill_batch=1)
    engine, prompt = FleetEngine(setup, 2), tuple(range(1, 33))
    engine.fleet.add(setup.request("busy", 5, 60))
    engine.fleet.add(setup.request("first", prompt))  # the second copy has it
    while "first" not in engine.finished:
        engine.step()
    engine.fleet.abort("busy")
    again = setup.request("again", prompt)
    engine.fleet.add(again)
    assert [copy.live for copy in engine.fleet.copies] == [0, 1]
    engine.run()
    assert again.stats.cached_tokens > 0


def test_an_answer_is_found_again_on_whichever_copy_gave_it() -> None:
    """Keys of a prompt's blocks are made once, and then more of them, of the answer."""
    setup = Setup(rows=4, prefill_batch=1)
    engine = FleetEngine(setup, 2)
    engine.fleet.add(setup.request("busy", 5, 200))
    first = setup.request("first", tuple(range(1, 17)), 32)  # on the second copy
    engine.fleet.add(first)
    while "first" not in engine.finished:
        engine.step()
    engine.fleet.abort("busy")
    again = setup.request("again", (*first.prompt, *first.output, 5, 6))
    engine.fleet.add(again)
    engine.run()
    assert again.stats.cached_tokens > len(first.prompt) + len(first.output) - 8


def test_a_request_goes_where_host_memory_holds_its_prompt() -> None:
    setup = Setup(
        rows=3, prefill_batch=1, groups=(history(4),), pages=(24,), host_slots=40, chunk=16
    )
    engine, prompt = FleetEngine(setup, 2), tuple(range(1, 33))
    engine.fleet.add(setup.request("busy", 5, 60))
    engine.fleet.add(setup.request("first", prompt))
    while "first" not in engine.finished:
        engine.step()
    engine.fleet.abort("busy")
    while not engine.fleet.idle or engine.moving:
        engine.step()
    for pool in engine.fleet.copies[1].roster.reservations.pools:
        prefix = engine.fleet.copies[1].roster.reservations.prefix
        assert prefix is not None
        prefix.make_room(0, pool.total)  # the device lets all of it go
    again = setup.request("again", prompt)
    engine.fleet.add(again)
    assert [copy.live for copy in engine.fleet.copies] == [0, 1]
    engine.run()
    assert again.stats.host_tokens > 0


def test_requests_whose_pages_are_to_come_are_dealt_evenly_and_go_where_they_come() -> None:
    """Whatever the copies are busy with by then; one whose pages did not come goes anywhere."""
    setup = Setup(rows=4, prefill_batch=1)
    engine = FleetEngine(setup, 2)
    asked = [setup.request(f"{n}", 9, 20) for n in range(4)]
    assert [engine.fleet.assign(request) for request in asked] == [0, 1, 0, 1]
    for request in (asked[0], asked[2]):
        engine.fleet.add(request)
    engine.fleet.release("1")
    for request in (asked[3], asked[1]):
        engine.fleet.add(request)
    assert [engine.fleet.home(request.id) for request in asked] == [0, 1, 0, 1]
    late = [setup.request(f"late {n}", 9, 20) for n in range(2)]
    assert engine.fleet.assign(late[0]) == 0
    engine.fleet.add(late[1])
    assert engine.fleet.home("late 1") == 1  # the other copy has one that is to come
    engine.fleet.release("late 0")
    engine.run()
    assert not engine.fleet._assigned


def test_a_fleet_refuses_to_show_picks() -> None:
    """The round that shows them has one row, and copies go in step."""
    setup = Setup()
    request = setup.request("one", 4)
    request.shows = True
    with pytest.raises(RequestError, match="dp 1"):
        FleetEngine(setup, 2).fleet.add(request)


def test_an_id_is_taken_while_any_copy_serves_it() -> None:
    setup = Setup()
    engine = FleetEngine(setup, 2)
    engine.fleet.add(setup.request("one", 4))
    engine.fleet.add(setup.request("two", 4))
    for name in ("one", "two"):
        with pytest.raises(RequestError, match="in use"):
            engine.fleet.add(setup.request(name, 4))
    assert engine.fleet.abort("two") is not None and engine.fleet.abort("two") is None
    engine.fleet.add(setup.request("two", 4))
    engine.run()
    engine.fleet.add(setup.request("two", 4))
