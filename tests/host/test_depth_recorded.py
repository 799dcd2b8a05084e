# SPDX-License-Identifier: Apache-2.0
"""Choosing depths for drafts as they were: a host and a device that work side by side.

`agreements.json` has, for the requests of `benchmarks/bench_depth.py` (repeat 0, 160 tokens), how
many of the five drafts behind each token of the answer were right: the demo, float32, on a CPU.
Times are those of the demo on one H200, of the device by batch and depth, of the host by batch.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from freewheel.host.costs import Arrived, Pace
from freewheel.host.depth import DepthPolicy
from freewheel.spec import StepShape

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "agreements.json").read_text("utf-8")
)
DEPTHS, START, IN_FLIGHT, CHUNKS = (0, 1, 2, 3, 5), 3, 2, 2
DEVICE = dict(zip(DEPTHS, (150, 215, 276, 337, 458), strict=True))
"""Microseconds of a round of one row."""

WIDER = {1: 1.0, 2: 1.05, 4: 1.12, 8: 1.32}
HOST = {1: 195, 2: 250, 4: 325, 8: 430}
PROMPT = StepShape(1, 64, START)
QUIET, BUSY, CHANGING = (1.0, 0.12, 0.0), (1.4, 0.25, 0.0), (1.0, 0.25, 0.03)
"""A host's slowness, how much its times vary, and how fast the slowness changes."""


@dataclass
class Job:
    """A request on its way. `place`: tokens decided; `heard`: those that the host knows of."""

    name: str
    agreed: list[int]
    place: int = 0
    heard: int = 0
    chunks: int = CHUNKS
    drafts: int = START
    lag: int = 0
    flying: int = 0

    @property
    def left(self) -> int:
        return len(self.agreed) - self.heard


Told = list[tuple[Job, int, int]]


class Clocks:
    """Runs traces: microseconds on the host's clock, rounds in flight, letters in order."""

    def __init__(self, policy: DepthPolicy | int, host: tuple[float, float, float]) -> None:
        self.policy, self.rng, self.pace = policy, random.Random(3), Pace()
        self.slow, self.jitter, self.drift = host
        self.now = self.heard = self.device = 0.0
        self.letters: deque[tuple[StepShape, float, Told]] = deque()
        self.names, self.rounds = iter(range(10**6)), itertools.count()

    def work(self, microseconds: float) -> None:
        if self.drift:
            drift = self.rng.gauss(0, self.drift)
            self.slow = min(max(self.slow * math.exp(drift), 1.0), 2.0)
        self.now += microseconds * self.slow * math.exp(self.rng.gauss(0, self.jitter))
        self.now += self.rng.uniform(200, 2000) * (self.rng.random() < 0.003)

    def launch(self, shape: StepShape, told: Told) -> None:
        host = 150.0 if shape.for_prompts else 0.65 * HOST[shape.batch]
        spent = 250.0 if shape.for_prompts else WIDER[shape.batch] * DEVICE[shape.depth]
        self.work(host)
        self.device = max(self.device, self.now) + spent * math.exp(self.rng.gauss(0, 0.02))
        self.letters.append((shape, self.device, told))
        for job, _, _ in told:
            job.flying += 1
        if len(self.letters) > IN_FLIGHT:
            self.read()

    def read(self) -> None:
        shape, at, told = self.letters.popleft()
        worked, self.now = self.now - self.heard, max(self.now, at) + 15.0
        self.heard = self.now
        arrived = Arrived(1e-6 * self.now, 1e-6 * worked)
        took = self.pace.letter(shape, (letter[0] for letter in self.letters), arrived)
        self.work(0.3 * HOST[shape.batch])
        listens = isinstance(self.policy, DepthPolicy) and (
            shape.for_prompts or self.policy.listens(next(self.rounds))
        )
        for job, offered, agreed in told:
            job.flying -= 1
            ends = job.left <= 1 + agreed
            if isinstance(self.policy, DepthPolicy) and job.left > 0:
                if ends:
                    self.policy.forget(job.name)
                elif listens:
                    self.policy.count(job.name, offered, agreed, job.left - 1 - agreed)
            job.heard += 1 + agreed if job.left > 0 else 0
        if listens and took is not None and not shape.for_prompts:
            assert isinstance(self.policy, DepthPolicy)
            self.policy.took(shape, *took)

    def depth(self, batch: int, rows: list[Job]) -> int:
        depth = self.policy
        if isinstance(depth, DepthPolicy):
            depth = depth.choose(StepShape(batch, 1, 0), [job.name for job in rows])
        if depth and any(job.lag for job in rows):
            for job in rows:
                job.lag = -1  # a round without drafts, in which the drafter catches up
            depth = 0
        return depth

    def decode(self, rows: list[Job]) -> None:
        batch = next(b for b in HOST if b >= len(rows))
        depth = self.depth(batch, rows)
        told: Told = []
        for job in rows:
            room = max(len(job.agreed) - job.place - 1, 0)
            offered = min(job.drafts, depth, room)
            agreed = min(offered, job.agreed[min(job.place, len(job.agreed)) - 1])
            job.place, job.drafts = job.place + 1 + agreed, depth
            job.lag = 0 if depth else job.lag + 1
            told.append((job, offered, agreed))
        self.launch(StepShape(batch, 1 + depth, depth), told)

    def piece(self, answers: Sequence[Sequence[int]], at_once: int) -> None:
        waiting = deque(Job(f"{next(self.names)}", list(answer)) for answer in answers)
        live: list[Job] = []
        prompts = True
        while waiting or live or self.letters:
            live = [job for job in live if job.left > 0]
            while waiting and len(live) < at_once:
                live.append(waiting.popleft())
            rows = [job for job in live if not job.chunks and job.left > job.flying]
            coming = next((job for job in live if job.chunks), None)
            if coming is not None and (prompts or not rows):
                coming.chunks -= 1
                coming.place = 0 if coming.chunks else 1
                self.launch(PROMPT, [] if coming.chunks else [(coming, 0, 0)])
            elif rows:
                self.decode(rows)
            elif self.letters:
                self.read()
            prompts = not prompts


def microseconds(trace: str, policy: DepthPolicy | int, host: tuple[float, float, float]) -> float:
    clocks = Clocks(policy, host)
    for _ in range(3):
        for one in RECORDED[trace]:
            answers = [[int(digit) for digit in digits] for digits in one["requests"]]
            clocks.piece(answers, one["at_once"])
    return clocks.now


def new_policy() -> DepthPolicy:
    policy = DepthPolicy(DEPTHS, START, IN_FLIGHT + 2)
    for batch, wider in WIDER.items():
        for depth, one in DEVICE.items():
            policy.took_empty(StepShape(batch, 1 + depth, depth), 1e-6 * wider * one)
    return policy


@cache
def against_best(trace: str, host: tuple[float, float, float]) -> float:
    """Speed with a depth that is chosen, by that with the fixed one that is best for the trace."""
    best = min(microseconds(trace, depth, host) for depth in DEPTHS)
    return best / microseconds(trace, new_policy(), host)


@pytest.mark.parametrize("host", [QUIET, BUSY, CHANGING], ids=["quiet", "busy", "changing"])
@pytest.mark.parametrize("trace", RECORDED)
def test_recorded_drafts_are_used_about_as_well_as_by_the_best_depth(
    trace: str, host: tuple[float, float, float]
) -> None:
    assert against_best(trace, host) >= 0.97


def test_on_average_a_chosen_depth_is_no_slower_than_the_best_fixed_one() -> None:
    every = [against_best(trace, host) for trace in RECORDED for host in (QUIET, BUSY, CHANGING)]
    assert sum(every) / len(every) >= 1.0
