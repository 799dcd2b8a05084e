# SPDX-License-Identifier: Apache-2.0
"""A transfer has ended once it has on every rank of its copy, however late each of them is."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.runtime.convoy import ROOM, Convoy, Part
from freewheel.runtime.errands import ARRIVED, Arrivals, words_of_ending
from freewheel.runtime.streams import NoStreams
from freewheel.spec import BlockCopy, Transfer, TransferResult, Way
from freewheel.spec.mesh import Mesh
from freewheel.spec.transfer_words import transfers_in


@dataclass
class SlowMover:
    """Ends what it was given, in that order, when a test says so."""

    slots: int = 4
    slot_bytes: int = 100
    under_way: deque[Transfer] = field(default_factory=deque[Transfer])
    damaged: dict[tuple[int, int], set[int]] = field(default_factory=dict[Any, set[int]])
    log: list[str] = field(default_factory=list[str])
    _done: list[TransferResult] = field(default_factory=list[TransferResult])

    def follow(self, mark: object) -> None:
        self.log.append("follow")

    def start(self, transfer: Transfer) -> None:
        self.log.append("start")
        self.under_way.append(transfer)

    def go_on(self) -> None: ...

    def end_one(self) -> None:
        if self.under_way:
            one = self.under_way.popleft()
            found = self.damaged.get((one.replica, one.id), set())
            self._done.append(TransferResult(one.id, frozenset(found)))

    def ended(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done


@dataclass
class Round:
    """One question, and what ranks have answered so far."""

    ranks: int
    given: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    @property
    def here(self) -> bool:
        return len(self.given) == self.ranks

    def take(self) -> Tensor:
        return torch.stack([self.given[rank] for rank in range(self.ranks)])


class Hub:
    """Ranks of one process. What rank 0 says lies in each rank's `inbox` until that rank hears."""

    def __init__(self, tp: int, dp: int) -> None:
        ranks = tp * dp
        self.movers = [SlowMover() for _ in range(ranks)]
        self.inbox = [deque[Callable[[], object]]() for _ in range(ranks)]
        self.rounds: list[Round] = []
        self.asked = [0] * ranks
        meshes = [Mesh(tp, rank, dp=dp) for rank in range(ranks)]
        self.parts = [
            Part(mover, mesh, NoStreams(), Voice(self, mesh.rank))  # type: ignore[arg-type]
            for mover, mesh in zip(self.movers, meshes, strict=True)
        ]
        self.convoy = Convoy(self.parts[0])

    def ask(self, rank: int, own: Tensor) -> Round:
        number = self.asked[rank]
        self.asked[rank] += 1
        while number >= len(self.rounds):
            self.rounds.append(Round(len(self.parts)))
        self.rounds[number].given[rank] = own
        return self.rounds[number]

    def hear(self, rank: int) -> None:
        if self.inbox[rank]:
            self.inbox[rank].popleft()()


@dataclass
class Voice:
    """What one rank says to all."""

    hub: Hub
    rank: int

    def move(self, words: Tensor) -> None:
        for rank in range(1, len(self.hub.parts)):
            told = transfers_in(np.asarray(words).tolist())
            part = self.hub.parts[rank]
            self.hub.inbox[rank].append(lambda part=part, told=told: part.start(told))

    def settle(self) -> None:
        for rank in range(1, len(self.hub.parts)):
            self.hub.inbox[rank].append(self.hub.parts[rank].answer)

    def ask(self, own: Tensor) -> Round:
        return self.hub.ask(self.rank, own)

    def check(self) -> None: ...


def transfer(number: int, replica: int, blocks: int = 2) -> Transfer:
    copies = tuple(BlockCopy(n, n, ((n,),)) for n in range(blocks))
    return Transfer(number, (Way.OUT, Way.IN)[number % 2], copies, (), replica)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_no_transfer_counts_as_ended_before_all_ranks_of_its_copy_have_ended_it(
    tp: int, dp: int
) -> None:
    """Under many orders of hearing and ending; damage found anywhere is damage."""
    for seed in range(60):
        rng = random.Random(seed)
        hub = Hub(tp, dp)
        wanted: dict[tuple[int, int], set[int]] = {}
        results: list[TransferResult] = []
        ids = [0] * dp
        for mover in hub.movers:
            mover.damaged = {
                (c, n): set(rng.sample(range(2), rng.randrange(3)))
                for c in range(dp)
                for n in range(20)
                if rng.random() < 0.3
            }
        for step in range(400):
            act = rng.randrange(4)
            if act == 0 and step < 200 and max(ids) < 20:
                replica = rng.randrange(dp)
                hub.convoy.start(transfer(ids[replica], replica))
                own = hub.movers[replica * tp : (replica + 1) * tp]
                key = (replica, ids[replica])
                wanted[key] = set().union(*(mover.damaged.get(key, set()) for mover in own))
                ids[replica] += 1
            elif act == 1:
                hub.convoy.go_on()
                found = hub.convoy.ended()
                for result in found:
                    own = hub.movers[result.replica * tp : (result.replica + 1) * tp]
                    assert all(one.id != result.id for mover in own for one in mover.under_way)
                results += found
            elif act == 2:
                hub.hear(rng.randrange(tp * dp))
            else:
                hub.movers[rng.randrange(tp * dp)].end_one()
        results += drain(hub)
        assert {(one.replica, one.id): set(one.damaged) for one in results} == wanted
        assert len(results) == len(wanted)


def drain(hub: Hub) -> list[TransferResult]:
    results: list[TransferResult] = []
    for _ in range(100):
        hub.convoy.go_on()
        for rank, mover in enumerate(hub.movers):
            mover.end_one()
            hub.hear(rank)
        results += hub.convoy.ended()
    return results


def test_more_damage_than_one_answer_holds_is_said_in_the_next() -> None:
    hub, blocks = Hub(2, 1), 2 * ROOM + 5
    hub.movers[1].damaged = {(0, 0): set(range(blocks))}
    hub.convoy.start(transfer(0, 0, blocks))
    hub.convoy.start(transfer(1, 0))
    found = {one.id: one.damaged for one in drain(hub)}
    assert found == {0: frozenset(range(blocks)), 1: frozenset()}
    assert len(hub.rounds) >= 3


def test_a_rank_that_answers_late_keeps_nobody_waiting() -> None:
    """Rank 1 hears nothing: rank 0 goes on, asks no second question, and ends nothing."""
    hub = Hub(2, 1)
    for number in range(5):
        hub.convoy.start(transfer(number, 0))
        hub.convoy.go_on()
        hub.movers[0].end_one()
        assert hub.convoy.ended() == []
    assert hub.asked == [1, 0] and len(hub.movers[0].log) == 10
    assert {one.id for one in drain(hub)} == set(range(5))


def test_an_errand_has_ended_once_all_ranks_of_its_copy_have_said_so() -> None:
    """What one says of its failure may come in pieces, with those of others between."""
    book, why = Arrivals(Mesh(2, dp=2)), "the other engine went away: nothing came, und zwar ewig"
    book.begin(5)
    book.begin(6)
    first, *rest = words_of_ending(5, why)
    book.heard(1, *first)
    assert list(words_of_ending(6, None)) == [(6, ARRIVED)]
    for rank, number in ((2, 6), (0, 5), (3, 6)):
        assert book.open and not book.ended()
        book.heard(rank, number, ARRIVED)
    assert book.ended() == {6: None}
    for pair in rest:
        assert book.open
        book.heard(1, *pair)
    assert book.ended() == {5: f"rank 1: {why}"} and not book.open


def test_what_is_said_of_a_forgotten_errand_is_passed_over() -> None:
    book = Arrivals(Mesh(2))
    book.begin(1)
    book.heard(0, 1, ARRIVED)
    book.forget()
    for pair in words_of_ending(1, "late " * 100):
        book.heard(1, *pair)
    book.begin(2)
    for rank in range(2):
        for pair in words_of_ending(2, None):
            book.heard(rank, *pair)
    assert book.ended() == {2: None}


def test_copies_are_queued_behind_the_rounds_that_were_launched_on_their_rank() -> None:
    log: list[str] = []

    class Mark:
        def set(self) -> None:
            log.append("set")

    class Watched(NoStreams):
        @contextmanager
        def rounds(self) -> Generator[None]:
            log.append("rounds")
            yield
            log.append("beside")

        def mark(self) -> Any:
            return Mark()

    mover: Any = SlowMover(log=log)
    part = Part(mover, Mesh(2, 1), Watched(), Voice(Hub(2, 1), 1))  # type: ignore[arg-type]
    part.start([transfer(0, 0), transfer(1, 0)])
    assert log == ["rounds", "set", "beside", "follow", "start", "start"]
    part.start([transfer(0, 1)])
    assert len(log) == 6  # another copy's
