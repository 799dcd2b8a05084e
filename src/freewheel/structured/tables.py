# SPDX-License-Identifier: Apache-2.0
"""From an automaton over bytes to one over tokens, and to the table that the device follows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freewheel.spec import Grammar
from freewheel.spec.adjustments import MAX_GRAMMAR_CELLS
from freewheel.structured.schema import Refusal

MAX_STATES = 1 << 14
MAX_STEPS = 3 * 10**8
"""States times tokens: some 4 seconds of work, where the host follows a grammar at once."""


@dataclass(frozen=True)
class ByteAutomaton:
    """`following[s, b]`: the state after byte b in state s; state 0 is dead. `ends[s]`: may end.

    `control`: likewise the states after tokens that are no text, by their ids.
    """

    following: NDArray[np.int16]  # [S, 256]
    ends: NDArray[np.bool_]  # [S]
    start: int
    control: Mapping[int, NDArray[np.int16]] = field(default_factory=dict[int, NDArray[np.int16]])


def byte_automaton(
    transitions: Mapping[int, Mapping[int, int]], start: int, finals: Sequence[int], mark: int
) -> ByteAutomaton:
    """From transitions by state and byte. Byte `mark` and ids above 255 are left out.

    Raises Refusal if there are too many states.
    """
    states = sorted(
        {start, *transitions, *(t for row in transitions.values() for t in row.values())}
    )
    if len(states) >= MAX_STATES:
        raise Refusal(f"has {len(states)} states; at most {MAX_STATES - 1} fit")
    number = {state: index + 1 for index, state in enumerate(states)}
    following = np.zeros((len(states) + 1, 256), dtype=np.int16)
    for state, row in transitions.items():
        for byte, target in row.items():
            if byte < 256 and byte != mark:
                following[number[state], byte] = number[target]
    ends = np.zeros(len(states) + 1, dtype=np.bool_)
    ends[[number[state] for state in finals]] = True
    return ByteAutomaton(following, ends, number[start])


def token_grammar(automaton: ByteAutomaton, vocabulary: Sequence[bytes | None]) -> Grammar:
    """The automaton over tokens, without states from which no tokens lead to an end.

    Raises Refusal if nothing is left, or if the table is too big.
    """
    steps = len(automaton.ends) * len(vocabulary)
    if steps > MAX_STEPS:
        raise Refusal(f"takes {steps} steps of states and tokens; at most {MAX_STEPS} are made")
    kinds, columns = _classes(automaton, vocabulary)  # int64 [V]; int16 [K, S]
    following = columns.T.copy()  # int16 [S, K]
    live = _can_end(following, automaton.ends)
    if not live[automaton.start]:
        raise Refusal("allows no text that this model's tokens spell")
    following[~live[following]] = 0
    kept = _reached(following, automaton.start)  # int64 [N], the start first
    number = np.zeros(len(live), dtype=np.int16)
    number[kept] = np.arange(len(kept)) + 1
    lines = number[following[kept]] - 1  # int16 [N, K], -1 dead
    kinds, lines = _merged(kinds, lines)
    states, classes = lines.shape
    if states * (classes + 1) > MAX_GRAMMAR_CELLS:
        raise Refusal(
            f"takes {states} states of {classes} classes of tokens; at most {MAX_GRAMMAR_CELLS} "
            "cells fit"
        )
    body = np.concatenate([lines, automaton.ends[kept][:, None]], 1).astype(np.int16)
    table = kinds.astype(np.int16).tobytes() + body.tobytes()
    key = hashlib.sha256(table).hexdigest()
    return Grammar(key, states, classes, 0, table)


def _classes(
    automaton: ByteAutomaton, vocabulary: Sequence[bytes | None]
) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """(class of each token, int64 [V]; where a class leads from each state, int16 [K, S]).

    Tokens are followed from all states at once, byte by byte: the map of a prefix that several
    tokens share is made once.
    """
    states = len(automaton.ends)
    identity = np.arange(states, dtype=np.int16)
    maps: dict[bytes, NDArray[np.int16]] = {b"": identity}
    numbers: dict[bytes, int] = {}
    columns: list[NDArray[np.int16]] = [np.zeros(states, dtype=np.int16)]
    numbers[columns[0].tobytes()] = 0  # tokens that lead nowhere, and those that are no text
    kinds = np.zeros(len(vocabulary), dtype=np.int64)
    by_byte = np.ascontiguousarray(automaton.following.T)  # int16 [256, S]

    def sort(index: int, column: NDArray[np.int16]) -> None:
        key = column.tobytes()
        if key not in numbers:
            numbers[key] = len(columns)
            columns.append(column)
        kinds[index] = numbers[key]

    order = sorted((token, index) for index, token in enumerate(vocabulary) if token)
    for token, index in order:
        sort(index, _follow(token, maps, by_byte))
    for index, column in automaton.control.items():
        if index >= len(vocabulary):
            raise Refusal(f"names token {index}; the vocabulary has {len(vocabulary)}")
        sort(index, column)
    if len(columns) >= 1 << 15:
        raise Refusal(f"sorts tokens into {len(columns)} classes; at most {(1 << 15) - 1} fit")
    return kinds, np.stack(columns)


def _follow(
    token: bytes, maps: dict[bytes, NDArray[np.int16]], by_byte: NDArray[np.int16]
) -> NDArray[np.int16]:
    """int16 [S]: where `token` leads from each state. `maps` keeps the prefixes of one branch."""
    known = len(token)
    while token[:known] not in maps:
        known -= 1
    for stale in [prefix for prefix in maps if len(prefix) > known]:
        del maps[stale]  # tokens come in order: these prefixes do not come again
    column = maps[token[:known]]
    for end in range(known + 1, len(token) + 1):
        column = maps[token[:end]] = by_byte[token[end - 1]][column]
    return column


def _can_end(following: NDArray[np.int16], ends: NDArray[np.bool_]) -> NDArray[np.bool_]:
    live = ends.copy()
    while True:
        more = live | live[following].any(1)
        more[0] = False
        if (more == live).all():
            return live
        live = more


def _reached(following: NDArray[np.int16], start: int) -> NDArray[np.int64]:
    found, border = [start], [start]
    seen = np.zeros(len(following), dtype=np.bool_)
    seen[[0, start]] = True
    while border:
        fresh = [int(state) for state in np.unique(following[border]) if not seen[state]]
        seen[fresh] = True
        found += fresh
        border = fresh
    return np.array(found, dtype=np.int64)


def _merged(
    kinds: NDArray[np.int64], lines: NDArray[np.int16]
) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """Classes that no longer differ, joined."""
    _, first, place = np.unique(lines, axis=1, return_index=True, return_inverse=True)
    return place.reshape(-1)[kinds], lines[:, first]
