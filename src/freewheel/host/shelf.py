# SPDX-License-Identifier: Apache-2.0
"""Which grammars' tables lie on the device, and which are on their way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from freewheel.host.request import Request
from freewheel.spec import Grammar, TableWrite


@dataclass(eq=False)
class Place:
    """Room for one table, from cell `base` on. `sent`: cells that rounds have brought so far.

    `holders`: live requests that have been promised the grammar, by id. `turn`: when it was last
    wanted.
    """

    base: int
    grammar: Grammar | None = None
    sent: int = 0
    turn: int = -1
    holders: dict[str, Request] = field(default_factory=dict[str, Request])

    @property
    def ready(self) -> bool:
        return self.grammar is not None and self.sent == self.grammar.cells


class Shelf:
    """`places` tables of up to `cells` int16; a round brings `piece` cells of one.

    A place whose grammar no live request holds is given to another; so is one that is held only by
    requests which wait behind whoever needs it: they would wait for each other otherwise. No round
    in flight minds: rounds run in order, and no later one has a row that follows the old table.
    """

    def __init__(self, places: int, cells: int, piece: int) -> None:
        self._places = [Place(index * cells) for index in range(places)]
        self._piece = piece
        self._turn = 0

    def ready(self, request: Request) -> bool:
        """The request may be admitted: it has no grammar, or the whole table has been launched."""
        return request.grammar is None or self._hold(request)

    def due(self, waiting: Iterable[Request]) -> TableWrite | None:
        """The next piece of a table that a waiting request needs, in the order of the queue.

        None if all have theirs, or if no place is free for the first that has not.
        """
        ahead: set[str] = set()
        for request in waiting:
            if request.grammar is None:
                continue
            if self._hold(request, ahead):
                ahead.add(request.id)
                continue
            place = self._place_of(request.grammar)
            if place is None:
                return None
            assert place.grammar is not None
            start, table = place.sent, place.grammar.table
            place.sent = min(start + self._piece, place.grammar.cells)
            return TableWrite(place.base + start, table[2 * start : 2 * place.sent])
        return None

    def release(self, request: Request) -> None:
        """The request has ended."""
        for place in self._places:
            place.holders.pop(request.id, None)

    def _hold(self, request: Request, ahead: set[str] | None = None) -> bool:
        """Whether the table is there; if there is room for it, the request holds it from now on.

        `ahead`: all who wait before this request; None if that is not known.
        """
        assert request.grammar is not None
        self._turn += 1
        place = self._place_of(request.grammar) or self._free_place(request.grammar, ahead)
        if place is None:
            return False
        place.turn = self._turn
        place.holders[request.id] = request
        request.grammar_base = place.base
        return place.ready

    def _place_of(self, grammar: Grammar) -> Place | None:
        for place in self._places:
            if place.grammar is not None and place.grammar.key == grammar.key:
                return place
        return None

    def _free_place(self, grammar: Grammar, ahead: set[str] | None) -> Place | None:
        free = [place for place in self._places if not place.holders]
        if not free and ahead is not None:
            free = [place for place in self._places if _held_behind(place, ahead)]
        if not free:
            return None
        place = min(free, key=lambda one: one.turn)
        place.grammar, place.sent = grammar, 0
        place.holders.clear()
        return place


def _held_behind(place: Place, ahead: set[str]) -> bool:
    """All who hold the place wait, and none of them before those who are `ahead`."""
    return all(one.tenancy is None and one.id not in ahead for one in place.holders.values())
