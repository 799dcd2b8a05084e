# SPDX-License-Identifier: Apache-2.0
"""Masks of the host: what they ban, and where nothing is decided without one."""

from __future__ import annotations

import pytest
import torch

from freewheel import ops
from freewheel.graph import no_host_sync
from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS
from freewheel.ops.constraining import GUIDED
from tests.ops.adjust_cases import ints
from tests.ops.grammar_cases import ROWS, VOCABULARY
from tests.ops.guide_cases import guide_case, mask_letter


@pytest.mark.parametrize("seed", range(30))
def test_the_cpu_body_guides_as_the_specification_does(seed: int) -> None:
    args = guide_case(seed, 1 + seed % 4)
    found = IMPLEMENTATIONS["guide", "cpu"](*args)
    expected = SPECIFICATIONS["guide"](*args)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_cases_hold_some_queries_ban_some_tokens_and_leave_some_alone() -> None:
    held = banned = alone = 0
    for seed in range(30):
        args = guide_case(seed, 3)
        logits, rest = ops.guide(*args)
        changed = (logits != args[0]).any(-1)
        held, banned = held + int(rest.sum()), banned + int(changed.sum())
        alone += int((~rest & ~changed).sum())
    assert min(held, banned, alone) > 20


def test_a_specification_reads_nothing_on_the_host() -> None:
    rows, words = mask_letter(1)
    kept = ints(*[0] * ROWS), torch.zeros(ROWS, 2, dtype=torch.int32)
    args = guide_case(1, 3)
    with no_host_sync():
        SPECIFICATIONS["guide"](*args)
        SPECIFICATIONS["apply_masks"](rows, words, *kept)


def test_masks_are_kept_for_the_rows_that_got_one() -> None:
    rows, words = mask_letter(2)
    lens, masks = ints(*range(ROWS)), torch.arange(2 * ROWS, dtype=torch.int32).view(ROWS, 2)
    before = lens.clone(), masks.clone()
    ops.apply_masks(rows, words, lens, masks)
    for row in range(ROWS):
        got = {3: 0, 1: 2}.get(row)
        assert lens[row] == (before[0][row] if got is None else words[got, 0])
        assert torch.equal(masks[row], before[1][row] if got is None else words[got, 1:])


def test_a_mask_stands_for_one_position_and_holds_what_is_behind_it() -> None:
    logits = torch.zeros(1, 3, VOCABULARY)
    grammars = ints(0, 0, 0, 0, 0, 0, 1, GUIDED, -1, -1).view(2, 5)
    masks = torch.zeros(2, 2, dtype=torch.int32)
    masks[1, 0] = 0b1010
    out, held = ops.guide(
        logits, ints(4, 5, 6).view(1, 3), ints(1), torch.zeros(2, 9, dtype=torch.int32),
        ints(0, 4), ints(0, 16), ints(0, 2), grammars, ints(-2, GUIDED), ints(0, 5), masks, 3,
    )  # fmt: skip
    assert held.tolist() == [[False, True, True]]
    assert (out[0, 0] == 0).nonzero().flatten().tolist() == [1, 3]


@pytest.mark.parametrize("body", [SPECIFICATIONS["commit"], ops.commit])
def test_a_held_choice_ends_the_run_and_not_the_row(body: object) -> None:
    """Row 1: held at once. Row 2: a draft agrees, then held. Row 3: no token, which is an error."""
    tokens = torch.zeros(4, 12, dtype=torch.int32)
    tokens[:, 5] = 7
    known, computed = ints(0, 5, 5, 5), ints(0, 4, 4, 4)
    drafts, limit = ints(0, 0, 2, 0), ints(0, 10, 6, 10)
    limit[2] = 10
    outbox = torch.zeros(3, 5 + 3, dtype=torch.int32)
    seen = ints(1, 0, 0, 1, 7, 8, 1, 0, 0).view(3, 3)
    choice = ints(-2, 0, 0, 7, -2, 9, -1, 0, 0).view(3, 3)
    stops = torch.full((4, 8), -1, dtype=torch.int32)
    accept, live = body(  # type: ignore[operator]
        tokens, known, computed, drafts, limit, outbox, stops, ints(1, 2, 3), ints(4, 4, 4),
        ints(1, 1, 1), ints(1, 3, 1), seen, choice,
    )  # fmt: skip
    assert accept.tolist() == [0, 1, 0] and live.tolist() == [1, 1, 0]
    assert outbox[:, :2].tolist() == [[0, 0], [1, 0], [0, 3]]
    assert known.tolist() == [0, 5, 6, 5] and computed.tolist() == [0, 4, 5, 4]
    assert limit.tolist() == [0, 10, 10, 5]
