# SPDX-License-Identifier: Apache-2.0
"""Grammars on a CPU: rows without one are left alone, and tokens are followed as integers."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.constraining import DEAD, FREE, OPTIONAL, WAITING
from freewheel.ops.registry import implement


@implement("store_table", "cpu")
def store_table(words: Tensor, tables: Tensor) -> None:
    """int32 [2 + N], int16 [cells]: as the specification."""
    first, count = words[:2].tolist()
    tables[first : first + count] = words[2:].view(torch.int16)[:count]


def walk(state: int, tokens: list[int], grammar: list[int], tables: Tensor, vocabulary: int) -> int:
    """The state after `tokens`."""
    base, classes, start, trigger, _ = grammar
    for token in tokens:
        if state >= 0:
            cell = base + vocabulary + state * (classes + 1) + int(tables[base + token])
            following = int(tables[cell])
            state = following if following >= 0 else DEAD
        elif state == WAITING and token == trigger:
            state = start if classes else FREE
    return state


@implement("constrain", "cpu")
def constrain(
    logits: Tensor,  # float [B, C, V]
    positions: Tensor,  # int32 [B, C]
    rows: Tensor,  # int32 [B]
    tokens: Tensor,  # int32 [R, T]
    computed_lens: Tensor,  # int32 [R]
    uses: Tensor,  # int32 [R]
    stop_ids: Tensor,  # int32 [R, S]
    prompt_lens: Tensor,  # int32 [R]
    grammars: Tensor,  # int32 [R, 5]
    grammar_states: Tensor,  # int32 [R]
    tables: Tensor,  # int16 [cells]
    steps: int,
) -> Tensor:
    """float [B, C, V], equal to the specification."""
    out = logits.clone()
    vocabulary = logits.shape[-1]
    for index, row in enumerate(rows.tolist()):
        if not int(uses[row]) & 16:
            continue
        grammar, stops = grammars[row].tolist(), [s for s in stop_ids[row].tolist() if s >= 0]
        begin = max(int(computed_lens[row]), int(prompt_lens[row]))
        for column, position in enumerate(positions[index].tolist()):
            first = max(begin, position - steps + 1)
            past = tokens[row, first : position + 1].tolist()
            state = walk(int(grammar_states[row]), past, grammar, tables, vocabulary)
            line = out[index, column]
            if state == WAITING:
                _wait(line, position, grammar, stops)
            elif state >= 0:
                _ban(line, state, grammar, stops, tables)
    return out


def _wait(line: Tensor, position: int, grammar: list[int], stops: list[int]) -> None:
    _, classes, _, trigger, budget = grammar
    if 0 <= budget <= position + 1:
        kept = line[trigger].clone()
        line.fill_(float("-inf"))
        line[trigger] = kept
    elif classes and budget != OPTIONAL:
        line[stops] = float("-inf")


def _ban(line: Tensor, state: int, grammar: list[int], stops: list[int], tables: Tensor) -> None:
    base, classes = grammar[:2]
    vocabulary = line.shape[0]
    at = base + vocabulary + state * (classes + 1)
    may = tables[at : at + classes][tables[base : base + vocabulary].long()] >= 0
    if int(tables[at + classes]):
        may[stops] = True
    line.masked_fill_(~may, float("-inf"))


@implement("follow", "cpu")
def follow(
    tokens: Tensor,  # int32 [R, T]
    rows: Tensor,  # int32 [B]
    start: Tensor,  # int32 [B]
    accept_lens: Tensor,  # int32 [B]
    uses: Tensor,  # int32 [R]
    prompt_lens: Tensor,  # int32 [R]
    grammars: Tensor,  # int32 [R, 5]
    grammar_states: Tensor,  # int32 [R]
    tables: Tensor,  # int16 [cells]
    vocabulary: int,
    steps: int,
) -> None:
    """As the specification."""
    del steps
    for row, first, count in zip(rows.tolist(), start.tolist(), accept_lens.tolist(), strict=True):
        if int(uses[row]) & 16 and count > 0:
            begin = max(first, int(prompt_lens[row]))
            past = tokens[row, begin : first + count].tolist()
            state = int(grammar_states[row])
            grammar_states[row] = walk(state, past, grammars[row].tolist(), tables, vocabulary)
