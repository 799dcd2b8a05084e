# SPDX-License-Identifier: Apache-2.0
"""A failed engine's last requests once more, in the same turns, on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from freewheel import LLM
from freewheel.engine import TokenEngine
from freewheel.errors import RequestError
from freewheel.server.journal import Dump, Entry, Shape, shape_of

TURNS_BEYOND = 4
"""Turns after the last one known: an engine that fails has begun at least one more."""


@dataclass
class Replayed:
    """What became of it. `differing`: for each request whose tokens are not those of the dump,
    the place, the dump's token there and ours; None where one has ended and the other not.
    `refused`: what was said of orders that the failed engine may never have looked at.
    `same_rounds`: rounds from the first on that had the dump's shape and rows.
    """

    turns: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    same_tokens: int = 0
    differing: dict[str, tuple[int, int | None, int | None]] = field(
        default_factory=dict[str, tuple[int, int | None, int | None]]
    )
    refused: dict[str, str] = field(default_factory=dict[str, str])
    same_rounds: int = 0


def replay(
    dump: Dump,
    overrides: dict[str, Any],
    open_engine: Callable[..., LLM] = LLM,
    *,
    to_end: bool = False,
) -> Replayed:
    """Give every order at its turn. `overrides`: fields of EngineConfig that are to differ.

    Where turns fall out otherwise (a mask comes late, a depth is chosen by other times), it goes on
    until the dump's tokens have come. `to_end`: until every request has ended. An exception of a
    round is the caller's to see.
    """
    options = asdict(dump.config) | overrides
    engine = TokenEngine(open_engine(options.pop("model"), **options))
    return _Again(dump, engine).run(to_end)


class _Again:
    """A dump's orders, and an engine that is given them."""

    def __init__(self, dump: Dump, engine: TokenEngine) -> None:
        self._dump, self._engine = dump, engine
        self._found = Replayed()
        self._live: set[str] = set()
        self._rounds: list[Shape] = []

    def run(self, to_end: bool) -> Replayed:
        found, engine = self._found, self._engine
        last = self._dump.turns + self._dump.config.run_ahead + TURNS_BEYOND
        while found.turns <= last or (engine.busy and (to_end or self._behind())):
            for entry in self._dump.entries:
                self._obey(entry)
            for step in engine.step() if engine.busy else ():
                found.tokens.setdefault(step.id, []).extend(step.tokens)
                if step.finish is not None:
                    self._live.discard(step.id)
            self._rounds += map(shape_of, engine.rounds())
            found.turns += 1
        for entry in self._dump.entries:
            _compare(entry, found)
        pairs = zip(self._dump.rounds, self._rounds, strict=False)
        found.same_rounds = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return found

    def _behind(self) -> bool:
        """Some request that goes on here has not said yet what the dump's said."""
        return any(self._lacks(entry) for entry in self._dump.entries)

    def _lacks(self, entry: Entry) -> bool:
        said = self._found.tokens.get(entry.order.id, ())
        return entry.order.id in self._live and len(said) < len(entry.tokens)

    def _obey(self, entry: Entry) -> None:
        turn, order = self._found.turns, entry.order
        if turn == self._begun(entry):
            whose = (order.priority, order.tenant, order.shows)
            given = (order.id, order.prompt, order.params, order.cache_salt)
            try:
                self._engine.submit(*given, None, *whose)
            except RequestError as error:
                self._found.refused[order.id] = str(error)
            else:
                self._live.add(order.id)
        late = entry.aborted is not None and turn >= entry.aborted
        if late and order.id in self._live and not self._lacks(entry):
            self._engine.abort(order.id)
            self._live.discard(order.id)

    def _begun(self, entry: Entry) -> int | None:
        """The turn at which it was queued: behind all others where that is not known.

        None if it never was: its client left while its grammar was compiled.
        """
        if entry.begun is None and entry.aborted is None:
            return self._dump.turns
        return entry.begun


def _compare(entry: Entry, found: Replayed) -> None:
    """The dump's tokens are a beginning of ours, if nothing differs."""
    ours = found.tokens.get(entry.order.id, [])
    for place, told in enumerate(entry.tokens):
        mine = ours[place] if place < len(ours) else None
        if mine != told:
            found.differing[entry.order.id] = place, told, mine
            return
        found.same_tokens += 1
