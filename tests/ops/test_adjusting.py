# SPDX-License-Identifier: Apache-2.0
"""Penalties, biases and bans against a walk over each row in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from freewheel import ops
from freewheel.ops.registry import IMPLEMENTATIONS, SPECIFICATIONS
from tests.ops.adjust_cases import VOCABULARY, adjust_case

BODIES = [SPECIFICATIONS["adjust"], IMPLEMENTATIONS["adjust", "cpu"]]


def walked(args: tuple[torch.Tensor, ...], b: int, c: int) -> list[float]:
    """The logits of one query, changed token by token."""
    logits, positions, rows, tokens, uses, prompt_lens, penalties, ids, values, bad, allowed = args
    row, position = int(rows[b]), int(positions[b, c])
    used, line = int(uses[row]), logits[b, c].tolist()
    past = tokens[row, : position + 1].tolist()
    output = past[int(prompt_lens[row]) :]
    presence, frequency, repetition = penalties[row].tolist()
    for token in range(VOCABULARY):
        if used & 1:
            if token in past:
                line[token] = (
                    line[token] / repetition if line[token] > 0 else line[token] * repetition
                )
            line[token] -= frequency * output.count(token) + presence * (token in output)
        if used & 2 and token in ids[row].tolist():
            line[token] += float(values[row, ids[row].tolist().index(token)])
        if used & 4 and not int(allowed[row, token // 32]) >> (token % 32) & 1:
            line[token] = -math.inf
    for sequence in bad[row].tolist() if used & 8 else []:
        word = [token for token in sequence if token >= 0]
        if word and (len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]):
            line[word[-1]] = -math.inf
    return line


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("seed", range(12))
def test_adjusted_logits_are_those_of_a_walk_over_the_row(body, seed: int) -> None:
    args = adjust_case(seed, choices=1 + seed % 4, dtype=torch.float64)
    found = body(*args)
    for b in range(args[1].shape[0]):
        for c in range(args[1].shape[1]):
            want = torch.tensor(walked(args, b, c), dtype=torch.float64)
            torch.testing.assert_close(found[b, c], want, rtol=1e-6, atol=1e-6)


def test_a_query_behind_drafts_sees_them_as_if_accepted_and_no_others() -> None:
    """The logits behind position p do not depend on what stands behind p."""
    args = list(adjust_case(3, choices=4, dtype=torch.float64))
    args[4].fill_(15)
    args[1] = torch.arange(10, 14).repeat(5, 1).int()
    before = ops.adjust(*args)
    args[3] = args[3].clone()
    args[3][:, 12:] = (args[3][:, 12:] + 1) % 6
    after = ops.adjust(*args)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])


def test_a_row_that_uses_nothing_keeps_its_logits_whatever_its_columns_hold() -> None:
    args = list(adjust_case(5, choices=2))
    args[4].zero_()
    for column in args[5:]:
        column.fill_(3)
    assert torch.equal(ops.adjust(*args), args[0])


def test_scores_are_log_probabilities_with_the_lowest_of_equals_first() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 50, dtype=torch.float64).round(decimals=1)
    targets = torch.randint(0, 50, (2, 3), dtype=torch.int32)
    words = ops.score(logits, targets, 20)
    own = words[..., :1].contiguous().view(torch.float32)[..., 0].double()
    logged = logits.log_softmax(-1)
    want = logged.gather(2, targets.long()[..., None])[..., 0]
    torch.testing.assert_close(own, want, rtol=1e-6, atol=1e-6)
    for b in range(2):
        for n in range(3):
            order = sorted(range(50), key=lambda t: (-float(logits[b, n, t]), t))[:20]
            assert words[b, n, 1:21].tolist() == order
            values = words[b, n, 21:].contiguous().view(torch.float32).double()
            torch.testing.assert_close(values, logged[b, n, order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("seed", range(6))
def test_a_draft_asked_for_behind_the_rows_end_changes_no_other_query(body, seed: int) -> None:
    args = list(adjust_case(seed, choices=3, dtype=torch.float64))
    args[4].fill_(15)
    want = body(*args)
    args[1] = args[1].clone()
    args[1][:, 2] = args[3].shape[1]
    torch.testing.assert_close(body(*args)[:, :2], want[:, :2], rtol=0, atol=0)
