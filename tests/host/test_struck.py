# SPDX-License-Identifier: Apache-2.0
"""Rows that a canary strikes, in any schedule: each answer is whole, and no page is lost twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from freewheel.errors import FreewheelError
from freewheel.host import Request
from freewheel.spec import FinishReason, StepPlan, StepResult
from freewheel.spec.plan import RowResult
from freewheel.spec.shape import StepShape
from freewheel.spec.violation import Violation
from tests.host.device import Device, solo
from tests.host.engine import Engine, Setup, history, window


class Canary(Device):
    """Finds damage now and then: passes the row by until its next tenant."""

    share = 0.0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.struck: dict[int, Violation] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for row, admission in zip(plan.rows, plan.admissions, strict=True):
            if admission is not None:
                self.struck.pop(row, None)
        return super().execute(plan)

    def advance(self, number: int, shape: StepShape) -> RowResult:
        row = self.rows[number]
        if number not in self.struck and row.known < row.limit and self.rng.random() < self.share:
            columns = tuple(
                tuple(
                    sorted(self.rng.sample(sorted(table), min(len(table), self.rng.randrange(3))))
                )
                for table in row.tables
            )
            self.struck[number] = Violation(("kv",), columns)
        if number in self.struck:
            return RowResult(number, (), None, row.computed, 0, 0, violation=self.struck[number])
        return super().advance(number, shape)


def made(seed: int, **changed: Any) -> Engine:
    rng = random.Random(seed)
    groups = (history(), window(4, 6)) if seed % 2 else (history(),)
    usual: dict[str, Any] = {
        "groups": groups,
        "pages": (120,) * len(groups),
        "rows": 3,
        "run_ahead": seed % 4,
        "host_slots": 20 * (seed % 3),
        "chunk": 16,
    }
    setup = Setup(**(usual | changed))
    engine = Engine(setup, rng)
    engine.device = Canary(setup.groups, setup.row_width, rng)
    return engine


def settle(engine: Engine) -> None:
    for _ in range(3000):
        if engine.scheduler.idle:
            return
        engine.step()
    raise AssertionError("somebody starves")


@pytest.mark.parametrize("seed", range(24))
def test_struck_requests_answer_as_if_nothing_were(seed: int) -> None:
    engine = made(seed)
    Canary.share = 0.02
    shared = tuple(engine.rng.randrange(40) for _ in range(30))
    asked: list[Request] = []
    for n in range(14):
        own = tuple(engine.rng.randrange(40) for _ in range(engine.rng.randrange(1, 12)))
        prompt = (*shared[: engine.rng.randrange(0, 30)], *own)
        asked.append(engine.add(engine.setup.request(f"{seed}-{n}", prompt)))
        if engine.rng.random() < 0.2:
            engine.abort(engine.rng.choice(asked))
        for _ in range(engine.rng.randrange(4)):
            engine.step()
    settle(engine)
    for request in asked:
        if request.finish is not FinishReason.ABORT:
            assert (request.output, request.finish) == solo(request)
    alarm = engine.scheduler.alarm
    lost = sum(len(pool._lost) for pool in engine.pools)
    while engine.moving:
        engine.move()
        engine.moving += engine.scheduler.transfers()
    assert alarm.pages == sum(len(pool._condemned) for pool in engine.pools) >= lost
    for pool in engine.pools:
        assert pool.free + pool.cached + len(pool._lost) == pool.total


def test_an_engine_without_room_says_how_many_pages_are_out_of_use() -> None:
    engine, errors = made(0, pages=(24,), host_slots=0), list[str]()
    Canary.share = 0.9
    try:
        for n in range(40):
            engine.add(engine.setup.request(f"{n}", 20))
        settle(engine)
    except FreewheelError as error:
        errors.append(str(error))
    pool = engine.pools[0]
    assert len(errors) == 1 and pool.condemned > pool.total // 2
    assert f": {pool.condemned} of 24 pages of history are out of use, quarantined" in errors[0]


@pytest.mark.parametrize("seed", range(12))
def test_an_engine_that_runs_out_of_trusted_pages_says_so(seed: int) -> None:
    """It neither hangs nor hands out what is not to be trusted: every request ends, or the engine
    fails with an error, behind which another has all its pages again."""
    engine = made(seed, pages=(24,) * (1 + seed % 2), host_slots=0)
    Canary.share = 0.3
    try:
        for n in range(40):
            engine.add(engine.setup.request(f"{seed}-{n}", engine.rng.randrange(4, 30)))
        settle(engine)
    except FreewheelError as error:
        assert "never fit" in str(error) or "no row can run" in str(error), error
        pool = engine.pools[0]
        counts = f"{pool.condemned} of {pool.total} pages of {pool.group.name}"
        assert counts in str(error) and "are out of use, quarantined" in str(error), error
    engine.scheduler.roster.reservations.check()
