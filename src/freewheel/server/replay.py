# SPDX-License-Identifier: Apache-2.0
"""A failed engine's last requests once more, in the same turns, on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from freewheel import LLM
from freewheel.engine import TokenEngine
from freewheel.server.journal import Dump, Entry

TURNS_BEYOND = 4
"""Turns after the last one known: an engine that fails has begun at least one more."""


@dataclass
class Replayed:
    """What became of it. `differing`: for each request whose tokens are not those of the dump,
    the place, the dump's token there and ours; None where one has ended and the other not.
    """

    turns: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    same_tokens: int = 0
    differing: dict[str, tuple[int, int | None, int | None]] = field(
        default_factory=dict[str, tuple[int, int | None, int | None]]
    )


def replay(
    dump: Dump,
    overrides: dict[str, Any],
    open_engine: Callable[..., LLM] = LLM,
    *,
    to_end: bool = False,
) -> Replayed:
    """Give every order at its turn. `overrides`: fields of EngineConfig that are to differ.

    `to_end`: go on until every request has ended. An exception of a round is the caller's to see.
    """
    options = asdict(dump.config) | overrides
    engine = TokenEngine(open_engine(options.pop("model"), **options))
    last = dump.turns + dump.config.run_ahead + TURNS_BEYOND
    found = Replayed()
    while found.turns <= last or (to_end and engine.busy):
        for entry in dump.entries:
            _obey(engine, entry, found.turns, dump.turns)
        for step in engine.step() if engine.busy else ():
            found.tokens.setdefault(step.id, []).extend(step.tokens)
        found.turns += 1
    for entry in dump.entries:
        _compare(entry, found)
    return found


def _obey(engine: TokenEngine, entry: Entry, turn: int, last: int) -> None:
    order = entry.order
    if turn == (last if entry.begun is None else entry.begun):
        whose = {"priority": order.priority, "tenant": order.tenant}
        engine.submit(order.id, order.prompt, order.params, order.cache_salt, **whose)
    if turn == entry.aborted:
        engine.abort(order.id)


def _compare(entry: Entry, found: Replayed) -> None:
    """The dump's tokens are a beginning of ours, if nothing differs."""
    ours = found.tokens.get(entry.order.id, [])
    for place, told in enumerate(entry.tokens):
        mine = ours[place] if place < len(ours) else None
        if mine != told:
            found.differing[entry.order.id] = place, told, mine
            return
        found.same_tokens += 1
