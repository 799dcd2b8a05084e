# SPDX-License-Identifier: Apache-2.0
"""Random schedules on real, tiny models: every answer is that of the request alone and cold."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.engine.session import Live
from freewheel.host import TextStream
from freewheel.spec import FinishReason
from tests.program.whitebox import engine

VOCABULARY = 256
CONTEXT = 96


def tight(folder: Path, run_ahead: int, speculate: int, **more: Any) -> LLM:
    """Pages for little more than one full context, where a page more or less decides."""
    options: dict[str, Any] = {"context_len": CONTEXT, "run_ahead": run_ahead, "max_batch": 4}
    roomy = engine(folder, speculate=speculate, **options)
    whole = latest = 0
    for group, pages in zip(roomy.built.groups, roomy.built.sizes.pages, strict=True):
        size = group.page_bytes * (pages - 1)
        whole, latest = (
            (whole + size, latest) if group.retention is None else (whole, latest + size)
        )
    budget = int(0.3 * whole) + 2 * latest + 1
    return engine(folder, speculate=speculate, cache_bytes=budget, **options, **more)


@dataclass
class Schedule:
    """One history on an engine that has had others before, whose pages are still there."""

    llm: LLM
    rng: random.Random
    live: list[Live] = field(default_factory=list[Live])
    seen: Counter[str] = field(default_factory=Counter[str])

    def run(self) -> None:
        for _ in range(70):
            act = self.rng.random()
            if act < 0.2 and len(self.live) < 7:
                self.arrive()
            elif act < 0.23 and self.live:
                self.abort()
            elif self.llm._session.busy:
                self.llm._session.step()
            self.check_pages()
        while self.llm._session.busy:
            self.llm._session.step()
            self.check_pages()
        self.llm._session.close([])
        for pool in self.llm._session.scheduler.copies[0].roster.reservations.pools:
            assert pool.free + pool.cached == pool.total

    def arrive(self) -> None:
        prompt = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(1, 40))]
        if self.live and self.rng.random() < 0.6:
            twin = self.rng.choice(self.live).request
            whole = [*twin.prompt, *twin.output]
            prompt = [*whole[: self.rng.randint(1, len(whole))], *prompt][: CONTEXT - 8]
        params = SamplingParams(
            temperature=self.rng.choice([0.0, 0.0, 0.9]),
            seed=self.rng.randrange(2**31),
            max_tokens=self.rng.choice([1, 6, 30, None]),
            stop_token_ids=tuple(self.rng.sample(range(VOCABULARY), 3)),
            ignore_eos=True,
        )
        request = self.llm._request(
            prompt,
            params,
            self.rng.choice(["", "", "salt"]),
            priority=self.rng.choice([0, 0, -1, 4]),
            tenant=self.rng.choice("ab"),
        )
        decode = partial(self.llm.tokenizer.decode, skip_special_tokens=True)
        self.live.append(self.llm._session.add(request, TextStream(decode)))

    def abort(self) -> None:
        self.llm._session.close([self.rng.choice(self.live).request.id])

    def check_pages(self) -> None:
        """Every page is counted once, and has the owners that it says."""
        roster = self.llm._session.scheduler.copies[0].roster
        roster.reservations.check()
        for group, pool in enumerate(roster.reservations.pools):
            held = {page for request in roster.running for page in request.pages[group]}
            assert len(held) == pool.owned

    def check(self, cold: LLM) -> None:
        for one in self.live:
            request = one.request
            (alone,) = cold.generate([list(request.prompt)], request.params)
            output = tuple(request.output)
            if request.finish is FinishReason.ABORT:
                assert output == alone.token_ids[: len(output)]
            else:
                assert (output, request.finish) == (alone.token_ids, alone.finish_reason)
            self.seen["found"] += request.stats.cached_tokens > 0
            self.seen["preempted"] += request.stats.preemptions > 0
            self.seen["accepted"] += request.stats.agreed > 0


def run_schedules(
    folder: Path, count: int, seed: int, run_aheads: tuple[int, ...] = (0, 1, 2, 3)
) -> Counter[str]:
    seen: Counter[str] = Counter()
    cold = engine(folder, prefix_cache=False, max_batch=1, prefill_batch=1, context_len=CONTEXT)
    for run_ahead in run_aheads:
        llm = tight(folder, run_ahead, speculate=(3, 1, 7, 2)[run_ahead])
        for number in range(count):
            schedule = Schedule(llm, random.Random(1000 * seed + 10 * number + run_ahead))
            schedule.run()
            schedule.check(cold)
            seen += schedule.seen
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t32", "t4"])
def test_answers_under_random_schedules_are_those_of_cold_engines(
    folders: dict[str, Path], family: str
) -> None:
    assert run_schedules(folders[family], 1, seed=1, run_aheads=(2,))["accepted"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["t32", "t4"])
def test_answers_under_a_hundred_schedules_are_those_of_cold_engines(
    folders: dict[str, Path], family: str
) -> None:
    seen = run_schedules(folders[family], 25, seed=2)
    assert seen["preempted"] and seen["accepted"], seen
    assert seen["found"] or family == "t4", seen


def storm(llm: LLM, cold: LLM, doomed: int, stays: int) -> None:
    """Most requests are cancelled at a random token; the others end as if alone."""
    rng = random.Random(doomed)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    session = llm._session
    waiting = [rng.choices(range(VOCABULARY), k=rng.randint(1, 30)) for _ in range(doomed + stays)]
    everyone: list[Live] = []
    for number, prompt in enumerate(waiting):
        request = llm._request(prompt, params, "", priority=int(number < doomed))
        everyone.append(session.add(request, TextStream(lambda ids: "x" * len(ids))))
    open_ones = everyone[:doomed]
    marks = {one.request.id: rng.randint(1, 23) for one in open_ones}
    while open_ones:
        session.step()
        gone = [
            one
            for one in open_ones
            if len(one.request.output) >= marks[one.request.id] or rng.random() < 0.02
        ]
        session.close([one.request.id for one in gone])
        open_ones = [one for one in open_ones if not session.ended(one)]
    while session.busy:
        session.step()
    session.close([])
    for pool in session.scheduler.copies[0].roster.reservations.pools:
        assert (pool.owned, pool.quarantined) == (0, 0)
    for one in everyone[doomed:]:
        (alone,) = cold.generate([list(one.request.prompt)], params)
        assert tuple(one.request.output) == alone.token_ids


@pytest.mark.slow
def test_a_storm_of_cancels_leaves_survivors_their_tokens(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], context_len=64, run_ahead=1)
    storm(llm, engine(folders["t32"], context_len=64, max_batch=1, prefill_batch=1), 60, 6)


@pytest.mark.exhaustive
def test_a_storm_of_two_thousand_cancels_on_a_model(folders: dict[str, Path]) -> None:
    llm = engine(folders["t4"], context_len=64, run_ahead=1, max_batch=8)
    storm(llm, engine(folders["t4"], context_len=64, max_batch=1, prefill_batch=1), 2000, 50)
