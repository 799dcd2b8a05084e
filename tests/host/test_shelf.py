# SPDX-License-Identifier: Apache-2.0
"""Places for grammars' tables: whoever runs keeps theirs, and whoever is first gets one."""

from __future__ import annotations

import random

import pytest

from freewheel.host import Request
from freewheel.host.shelf import Shelf
from freewheel.host.tenancy import Tenancy
from freewheel.spec import Adjustments, Grammar, SamplingParams

GRAMMARS = tuple(Grammar(f"{n}", 2, 3, 1, bytes(2 * (10 + n))) for n in range(5))


def request(name: str, grammar: Grammar | None) -> Request:
    wishes = Adjustments(prompt_len=1, grammar=grammar)
    return Request(name, (1,), SamplingParams(), 0, 64, adjustments=wishes)


def bring(shelf: Shelf, waiting: list[Request]) -> int:
    """Rounds of tables until none is due."""
    rounds = 0
    while shelf.due(waiting) is not None:
        rounds += 1
        assert rounds < 1000, "tables are brought without end"
    return rounds


@pytest.mark.parametrize("seed", range(40))
def test_the_first_in_the_queue_gets_a_place_unless_running_requests_hold_them_all(
    seed: int,
) -> None:
    rng = random.Random(seed)
    shelf = Shelf(rng.randint(1, 3), 100, rng.choice([4, 100]))
    waiting: list[Request] = []
    running: dict[str, Request] = {}
    bases: dict[str, int] = {}
    for turn in range(200):
        act = rng.random()
        if act < 0.5 and len(waiting) < 6:
            grammar = rng.choice([None, *GRAMMARS])
            waiting.insert(rng.randint(0, len(waiting)), request(f"{turn}", grammar))
        elif act < 0.7 and running:
            gone = running.pop(rng.choice(list(running)))
            gone.tenancy = None
            if rng.random() < 0.5:
                waiting.insert(0, gone)  # preempted
            else:
                shelf.release(gone)
        elif waiting:
            bring(shelf, waiting)
            first = waiting[0]
            held = {one.grammar_base for one in running.values() if one.grammar is not None}
            full = len(held) == len(shelf._places)
            known = first.grammar is None or any(
                one.grammar is not None and one.grammar.key == first.grammar.key
                for one in running.values()
            )
            assert shelf.ready(first) or (full and not known), "nobody will ever run"
            if shelf.ready(first):
                waiting.remove(first)
                first.tenancy = Tenancy(1, 1, 2, ())
                running[first.id], bases[first.id] = first, first.grammar_base
        for one in running.values():
            if one.grammar is not None:
                (place,) = [p for p in shelf._places if p.base == bases[one.id]]
                assert place.ready and place.grammar == one.grammar, "a table in use was replaced"
