# SPDX-License-Identifier: Apache-2.0
"""Automata put together: one behind another, one or the other, both at once.

A `Net` is an automaton that may be in several states at once; `determined` makes one of it that is
in one (the subset construction).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from freewheel.structured.schema import Refusal
from freewheel.structured.tables import MAX_STATES, ByteAutomaton

BYTES = 256
MAX_PARTS = 1 << 16
"""States of all parts of a net."""


class Net:
    """Built from its end: each call gives a state from which `then` is reached by what it says."""

    def __init__(self, control_ids: Iterable[int]) -> None:
        """`control_ids`: tokens that are no text."""
        self._control = {token: BYTES + n for n, token in enumerate(sorted(set(control_ids)))}
        self._count = 0
        self._steps: list[tuple[int, int, int]] = []  # state, symbol, state
        self._free: dict[int, list[int]] = {}  # states that are reached by nothing
        self._blocks: list[tuple[int, ByteAutomaton]] = []
        self.end = self.state()

    def state(self, *free: int) -> int:
        """A new one, from which `free` are reached by nothing. Raises Refusal if they are too many.

        `free` of a state may be added to with `join`.
        """
        self._grow(1)
        if free:
            self._free[self._count - 1] = list(free)
        return self._count - 1

    def join(self, state: int, *free: int) -> None:
        self._free.setdefault(state, []).extend(free)

    def said(self, part: str | int, then: int) -> int:
        """A text, or a control token."""
        symbols = list(part.encode()) if isinstance(part, str) else [self._control[part]]
        for symbol in reversed(symbols):
            state = self.state()
            self._steps.append((state, symbol, then))
            then = state
        return then

    def block(self, automaton: ByteAutomaton, then: int) -> int:
        """All texts of an automaton."""
        first = self._count
        self._grow(len(automaton.ends))
        self._blocks.append((first, automaton))
        for state in np.flatnonzero(automaton.ends):
            self.join(first + int(state), then)
        return first + automaton.start

    def determined(self, start: int) -> ByteAutomaton:
        """From `start` to `end`. Raises Refusal if it has too many states."""
        kinds, targets = self._classes()
        known: dict[frozenset[int], int] = {}
        waiting: list[frozenset[int]] = []
        closures: dict[frozenset[int], int] = {}

        def number(states: frozenset[int]) -> int:
            if states not in closures:
                whole = self._closure(states)
                if whole not in known:
                    known[whole] = len(known) + 1
                    waiting.append(whole)
                    if len(known) >= MAX_STATES:
                        raise Refusal(f"has more than {MAX_STATES - 1} states")
                closures[states] = known[whole]
            return closures[states]

        number(frozenset({start}))
        rows: list[dict[int, int]] = [{}]
        while len(rows) <= len(waiting):
            reached: dict[int, set[int]] = {}
            for state in waiting[len(rows) - 1]:
                for kind, target in targets.get(state, ()):
                    reached.setdefault(kind, set()).add(target)
            rows.append({kind: number(frozenset(found)) for kind, found in reached.items()})
        lines = np.zeros((len(rows), int(kinds.max()) + 1), dtype=np.int16)
        for state, line in enumerate(rows):
            lines[state, list(line)] = list(line.values())
        following = lines[:, kinds]  # int16 [S, 256 + control tokens]
        ends = np.array([False, *(self.end in states for states in waiting)])
        control = {token: following[:, place].copy() for token, place in self._control.items()}
        return ByteAutomaton(following[:, :BYTES].copy(), ends, 1, control)

    def _grow(self, count: int) -> None:
        self._count += count
        if self._count > MAX_PARTS:
            raise Refusal(f"has more than {MAX_PARTS} states in all its parts")

    def _classes(self) -> tuple[NDArray[np.int64], Mapping[int, list[tuple[int, int]]]]:
        """(class of each symbol; from each state, pairs of a class and the state it leads to)."""
        symbols = BYTES + len(self._control)
        columns = np.full((symbols, self._count), -1, dtype=np.int32)
        for state, symbol, then in self._steps:
            columns[symbol, state] = then
        for first, automaton in self._blocks:
            found = automaton.following.T.astype(np.int32)
            part = columns[:BYTES, first : first + found.shape[1]]
            part[found > 0] = found[found > 0] + first
        numbers: dict[bytes, int] = {}
        kinds = np.array([numbers.setdefault(one.tobytes(), len(numbers)) for one in columns])
        firsts = [int(np.argmax(kinds == kind)) for kind in range(len(numbers))]
        targets: dict[int, list[tuple[int, int]]] = {}
        distinct = columns[firsts]  # int32 [classes, states]
        for kind, state in np.argwhere(distinct >= 0).tolist():
            targets.setdefault(state, []).append((kind, int(distinct[kind, state])))
        return kinds, targets

    def _closure(self, states: frozenset[int]) -> frozenset[int]:
        found, waiting = set(states), list(states)
        while waiting:
            more = [one for one in self._free.get(waiting.pop(), ()) if one not in found]
            found.update(more)
            waiting += more
        return frozenset(found)


def both(first: ByteAutomaton, second: ByteAutomaton) -> ByteAutomaton:
    """Texts of both. Raises Refusal if it has too many states."""
    width = len(second.ends)
    start = first.start * width + second.start
    known, waiting = {start: 1}, [start]
    rows = [np.zeros(BYTES, dtype=np.int64)]
    for pair in waiting:
        one, other = first.following[pair // width], second.following[pair % width]
        codes = np.where((one > 0) & (other > 0), one.astype(np.int64) * width + other, 0)
        for code in np.unique(codes[codes > 0]).tolist():
            if code not in known:
                known[code] = len(known) + 1
                waiting.append(code)
        if len(known) >= MAX_STATES:
            raise Refusal(f"has more than {MAX_STATES - 1} states")
        rows.append(codes)
    number = {0: 0} | known
    following = np.vectorize(number.__getitem__, otypes=[np.int16])(np.stack(rows))
    ends = [False, *(bool(first.ends[p // width] and second.ends[p % width]) for p in waiting)]
    return ByteAutomaton(following, np.array(ends), 1)


def up_to(text: str) -> ByteAutomaton:
    """Bytes that end with `text`, which stands nowhere before (Knuth, Morris and Pratt, 1977)."""
    return _looking_for(text, found=True)


def without(text: str) -> ByteAutomaton:
    """Bytes in which `text` does not occur."""
    return _looking_for(text, found=False)


def _looking_for(text: str, found: bool) -> ByteAutomaton:
    raw = text.encode()
    following = np.ones((len(raw) + 2, BYTES), dtype=np.int16)  # state n + 1: n bytes are there
    following[[0, -1]] = 0
    for count in range(len(raw)):
        for byte in range(BYTES):
            seen = raw[:count] + bytes([byte])
            length = next(n for n in range(len(seen), -1, -1) if seen.endswith(raw[:n]))
            following[count + 1, byte] = length + 1
    if not found:
        following[following == len(raw) + 1] = 0
    ends = np.zeros(len(raw) + 2, dtype=np.bool_)
    ends[[-1] if found else slice(1, -1)] = True
    return ByteAutomaton(following, ends, 1)
