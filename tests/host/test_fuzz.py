# SPDX-License-Identifier: Apache-2.0
"""Random engines under random schedules: every request ends as if it had run alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.errors import CapacityError
from freewheel.host import Request
from freewheel.spec import CacheGroup, FinishReason
from tests.host.device import VOCABULARY, solo
from tests.host.engine import Engine, Setup, history, window


def random_setup(rng: random.Random) -> Setup:
    groups: list[CacheGroup] = []
    if rng.random() < 0.8:
        groups.append(history(rng.choice([1, 3, 4, 8, 64])))
    if not groups or rng.random() < 0.5:
        groups.append(window(rng.choice([2, 4, 16]), rng.randint(1, 12)))
    context_len = rng.randint(16, 70)
    widths = rng.choice([(9,), (9, 16), (12, 24, 48)])
    room = rng.choice([1.0, 1.3, 2.0, 8.0])
    return Setup(
        depth=rng.choice([0, 1, 3, 7]),
        max_batch=rng.randint(1, 5),
        widths=widths,
        prefill_batch=rng.randint(1, 4),
        groups=tuple(groups),
        pages=tuple(pool_pages(g, context_len, widths[-1], room) for g in groups),
        rows=rng.randint(1, 6),
        context_len=context_len,
        row_width=context_len + rng.choice([0, 5, 20]),
        run_ahead=rng.randint(0, 3),
        chunk=rng.choice([None, *widths]),
        prefill_share=rng.choice([0.5, 0.5, 0.1, 0.9]),
    )


def pool_pages(group: CacheGroup, context_len: int, width: int, room: float) -> int:
    """Room for about `room` requests of the full context."""
    tokens = context_len + 8
    if group.retention is not None:
        tokens = min(tokens, group.retention + width + 7 + group.page_size)
    return 1 + int(room * group.pages_for(tokens))


def random_request(
    setup: Setup, rng: random.Random, number: int, lengths: tuple[int, ...] = (4, 12)
) -> Request:
    prompt = rng.randint(1, rng.choice([*lengths, setup.context_len - 1]))
    max_tokens = rng.choice([None, 1, rng.randint(1, 30)])
    stop_ids = tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 3])))
    min_tokens = rng.randint(0, max_tokens or 4)
    request = setup.request(f"{number}", prompt, max_tokens, min_tokens, stop_ids)
    request.priority = rng.choice([0, 0, 0, -1, 5])
    request.tenant = rng.choice("aab")
    return request


class Trial:
    """One random history: arrivals, aborts and host-side stops among rounds run late."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.setup = self.new_setup()
        self.engine = Engine(self.setup, self.rng)
        self.requests: list[Request] = []
        self.cut: dict[str, int] = {}
        self.aborted: set[str] = set()

    def new_setup(self) -> Setup:
        return random_setup(self.rng)

    def new_request(self) -> Request:
        return random_request(self.setup, self.rng, len(self.requests))

    def arrive(self) -> None:
        request = self.new_request()
        try:
            self.engine.add(request)
        except CapacityError:
            assert not self.fits(request)
            return
        assert self.fits(request)
        self.requests.append(request)

    def fits(self, request: Request) -> bool:
        """Alone, with nothing in flight, it would find the pages for every round it may need."""
        depth, widest = self.setup.depth, self.setup.chunk or self.setup.widths[-1]
        peak = min(request.limit - 1 + 2 * depth, self.setup.row_width)
        for group, pages in zip(self.setup.groups, self.setup.pages, strict=True):
            size, need = group.page_size, group.pages_for(peak)
            if group.retention is not None:
                reach = max(widest + depth, 1 + 2 * depth)
                spans = [
                    (computed + reach - 1) // size - (computed - group.retention) // size + 1
                    for computed in range(group.retention, group.retention + size)
                ]
                need = min(need, max(spans))
            if need > pages:
                return False
        return True

    def abort(self) -> None:
        if self.requests:
            request = self.rng.choice(self.requests)
            live = request.finish is None
            update = self.engine.abort(request)
            assert (update is not None) == live
            if live:
                self.aborted.add(request.id)

    def stop(self) -> None:
        if self.requests:
            request = self.rng.choice(self.requests)
            if request.finish is None and request.output:
                length = self.rng.randint(1, len(request.output))
                assert self.engine.scheduler.finish(request.id, FinishReason.STOP, length)
                self.cut[request.id] = length

    def run(self) -> None:
        for _ in range(120):
            act = self.rng.random()
            if act < 0.12 and len(self.requests) < 14:
                self.arrive()
            elif act < 0.14:
                self.abort()
            elif act < 0.16:
                self.stop()
            elif act < 0.5:
                self.engine.launch()
            elif self.engine.moving and act < 0.62:
                self.engine.move()
            elif self.engine.moving and act < 0.64:
                self.engine.damage()
            elif act < 0.75:
                self.engine.execute()
            elif self.engine.flights:
                self.engine.collect()
        work = sum(r.limit for r in self.requests)
        self.engine.drain(rounds=len(self.engine.plans) + 2 * work + 40)

    def check(self) -> None:
        for request in self.requests:
            output, reason = solo(request)
            if request.id in self.aborted:
                assert request.output == output[: len(request.output)]
                assert self.engine.endings(request) == [FinishReason.ABORT]
            elif request.id in self.cut:
                assert request.output == output[: self.cut[request.id]]
                assert self.engine.endings(request) == []
            else:
                assert request.output == output == self.engine.tokens(request)
                assert request.finish is reason
                assert self.engine.endings(request) == [reason]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_every_request_ends_as_if_it_had_run_alone(seed: int) -> None:
    trial = Trial(seed)
    trial.run()
    trial.check()


@pytest.mark.parametrize("seed", range(5))
def test_the_same_calls_give_the_same_plans(seed: int) -> None:
    first, second = Trial(seed), Trial(seed)
    first.run()
    second.run()
    assert first.engine.plans == second.engine.plans
