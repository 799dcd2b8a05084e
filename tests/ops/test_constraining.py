# SPDX-License-Identifier: Apache-2.0
"""Grammars in tables against a walk over each row in plain Python."""

from __future__ import annotations

import pytest
import torch

from freewheel.ops.registry import IMPLEMENTATIONS, SPECIFICATIONS
from tests.ops.adjust_cases import ints
from tests.ops.grammar_cases import VOCABULARY, GrammarCase, grammar_case


def bodies(name: str) -> list:
    return [SPECIFICATIONS[name], IMPLEMENTATIONS[name, "cpu"]]


def step(case: GrammarCase, row: int, state: int, token: int) -> int:
    base, classes, start, trigger, _ = case.grammars[row].tolist()
    if state == -1:
        return (start if classes else -2) if token == trigger else -1
    if state < 0:
        return state
    kind = int(case.tables[base + token])
    following = int(case.tables[base + VOCABULARY + state * (classes + 1) + kind])
    return following if following >= 0 else -3


def walked(case: GrammarCase, row: int, first: int, last: int) -> int:
    state = int(case.grammar_states[row])
    for position in range(max(first, int(case.prompt_lens[row])), last + 1):
        state = step(case, row, state, int(case.tokens[row, position]))
    return state


def allowed(case: GrammarCase, row: int, position: int) -> list[bool]:
    """Which tokens may stand behind `position`."""
    if not int(case.uses[row]) & 16:
        return [True] * VOCABULARY
    state = walked(case, row, int(case.computed_lens[row]), position)
    base, classes, _, trigger, budget = case.grammars[row].tolist()
    stops = case.stop_ids[row].tolist()
    if state == -1:
        if 0 <= budget <= position + 1:
            return [token == trigger for token in range(VOCABULARY)]
        closed = classes and budget != -2
        return [not (closed and token in stops) for token in range(VOCABULARY)]
    if state < 0:
        return [True] * VOCABULARY
    ends = int(case.tables[base + VOCABULARY + state * (classes + 1) + classes])
    return [
        step(case, row, state, token) >= 0 or bool(ends and token in stops)
        for token in range(VOCABULARY)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_only_what_the_grammar_lets_follow_keeps_its_logit(seed: int) -> None:
    case = grammar_case(seed, choices=1 + seed % 4, dtype=torch.float64)
    for body in bodies("constrain"):
        found = body(*case.arguments)
        for b, row in enumerate(case.rows.tolist()):
            for c, position in enumerate(case.positions[b].tolist()):
                if c and not position:
                    continue  # padding
                want = torch.tensor(allowed(case, row, position))
                assert torch.equal(found[b, c].isfinite(), want), (seed, b, c)
                assert torch.equal(found[b, c][want], case.logits[b, c][want])


@pytest.mark.parametrize("seed", range(20))
def test_a_state_follows_the_accepted_tokens_and_no_others(seed: int) -> None:
    case = grammar_case(seed, choices=4)
    start = case.computed_lens[case.rows.long()]
    accept_lens = ints(seed % 5, 1, 4, 0, 2)
    want = case.grammar_states.clone()
    for row, first, count in zip(
        case.rows.tolist(), start.tolist(), accept_lens.tolist(), strict=True
    ):
        if int(case.uses[row]) & 16 and count:
            want[row] = walked(case, row, first, first + count - 1)
    for body in bodies("follow"):
        states = case.grammar_states.clone()
        body(
            case.tokens, case.rows, start, accept_lens, case.uses, case.prompt_lens,
            case.grammars, states, case.tables, VOCABULARY, 4,
        )  # fmt: skip
        assert torch.equal(states, want)


def test_a_piece_of_a_table_lands_where_its_letter_says_and_nowhere_else() -> None:
    for body in bodies("store_table"):
        tables = torch.full((20,), 7, dtype=torch.int16)
        words = torch.zeros(2 + 4, dtype=torch.int32)
        words[2:].view(torch.int16).copy_(torch.arange(-3, 5, dtype=torch.int16))
        words[:2] = ints(6, 5)
        body(words, tables)
        assert tables[6:11].tolist() == [-3, -2, -1, 0, 1]
        assert tables[:6].tolist() == [7] * 6 and tables[11:19].tolist() == [7] * 8
