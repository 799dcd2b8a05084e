# SPDX-License-Identifier: Apache-2.0
"""What the host packs is what the rows hold, and an admission leaves no trace of before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from freewheel.errors import CapacityError
from freewheel.runtime.uplink import pack
from freewheel.spec import (
    Adjustments,
    Admission,
    CacheField,
    CacheGroup,
    Feed,
    Grammar,
    MaskWrite,
    PageWrite,
    StepPlan,
    StepShape,
)
from freewheel.spec.shape import ADJUSTS
from freewheel.state import Arena, InboxLayout, SequenceState, receive
from freewheel.state.letters import NOWHERE

GROUPS = tuple(
    CacheGroup(name, page_size, 1, None, (CacheField("x", 1, "float32", (0,)),))
    for name, page_size in (("first", 4), ("second", 8))
)
SHAPE = StepShape(3, 4, 3)
ROWS, WIDTH = 6, 40


def stale_state() -> SequenceState:
    """Rows full of an earlier tenant's values; row 0 is clean."""
    state = SequenceState.build(Arena("cpu"), ROWS, WIDTH, GROUPS)
    for tensor in vars(state).values():
        if isinstance(tensor, torch.Tensor):
            rows = tensor.transpose(0, 1) if tensor.dim() == 3 else tensor
            rows[1:] = 7
    return state


def apply(state: SequenceState, plan: StepPlan) -> None:
    layout = InboxLayout.of(plan.shape, GROUPS, state.tokens.shape[1])
    letter = np.full(layout.words, 12345, dtype=np.int32)  # a used buffer
    pack(plan, layout, letter)
    receive(state, torch.from_numpy(letter), plan.shape, GROUPS)


def plan_of(**changes: object) -> StepPlan:
    base = {
        "round_id": 1,
        "shape": SHAPE,
        "rows": (2, 4),
        "admissions": (None, None),
        "feeds": (None, None),
        "page_writes": (),
    }
    return StepPlan(**(base | changes))  # type: ignore[arg-type]


ADMISSION = Admission(
    known=9,
    computed=4,
    limit=30,
    minimum=12,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    seed=-(2**63) + 12345,
    stop_ids=(1, 63, 2),
)


def test_an_admission_sets_every_value_of_its_row_and_clears_its_tables() -> None:
    state = stale_state()
    apply(state, plan_of(admissions=(ADMISSION, None)))
    row = 2
    assert int(state.known_lens[row]) == 9
    assert int(state.computed_lens[row]) == 4
    assert int(state.draft_lens[row]) == 0
    assert int(state.limit_lens[row]) == 30
    assert int(state.minimum_lens[row]) == 12
    assert state.temperature[row] == torch.tensor(0.7)
    assert state.top_p[row] == torch.tensor(0.9)
    assert state.min_p[row] == torch.tensor(0.05)
    assert int(state.top_k[row]) == 40
    assert int(state.seeds[row]) == -(2**63) + 12345
    assert state.stop_ids[row].tolist() == [1, 63, 2, -1, -1, -1, -1, -1]
    assert not state.page_tables[:, row].any()


WISHES = Adjustments(
    prompt_len=5,
    presence=0.25,
    frequency=-0.5,
    repetition=1.5,
    biases=((3, 2.5), (0, -4.0)),
    allowed=(0, 31, 32, 69),
    bad_words=((4,), (1, 2, 3)),
    grammar=Grammar("key", 2, 3, 1, bytes(2 * (70 + 8))),
    trigger=6,
    budget=20,
    base=77,
)


def stale_adjusting_state() -> SequenceState:
    state = SequenceState.build(Arena("cpu"), ROWS, WIDTH, GROUPS, vocabulary=70, grammars=1)
    for tensor in (state.uses, *vars(state.adjust).values()):
        tensor[1:] = 7
    return state


def adjusting_plan(shape: StepShape, adjustments: Adjustments | None) -> StepPlan:
    admission = replace(ADMISSION, adjustments=adjustments)
    return plan_of(shape=shape, admissions=(None, admission))


def apply_adjusting(state: SequenceState, plan: StepPlan) -> None:
    layout = InboxLayout.of(plan.shape, GROUPS, state.tokens.shape[1], 70)
    letter = np.full(layout.words, 12345, dtype=np.int32)
    pack(plan, layout, letter)
    receive(state, torch.from_numpy(letter), plan.shape, GROUPS)


def test_an_admission_brings_all_that_its_request_wishes_to_its_row_alone() -> None:
    state, before = stale_adjusting_state(), stale_adjusting_state()
    apply_adjusting(state, adjusting_plan(StepShape(3, 16, 3, ADJUSTS), WISHES))
    row, columns = 4, state.adjust
    assert int(state.uses[row]) == WISHES.uses == 31
    assert int(columns.prompt_lens[row]) == 5
    assert columns.penalties[row].tolist() == [0.25, -0.5, 1.5]
    assert columns.bias_ids[row, :3].tolist() == [3, 0, -1]
    assert columns.bias_values[row, :2].tolist() == [2.5, -4.0]
    assert columns.bad_words[row, 0].tolist() == [-1] * 7 + [4]
    assert columns.bad_words[row, 1].tolist() == [-1] * 5 + [1, 2, 3]
    assert (columns.bad_words[row, 2:] == -1).all()
    bits = [v for v in range(96) if int(columns.allowed[row, v // 32]) >> (v % 32) & 1]
    assert bits == [0, 31, 32, 69]
    assert columns.grammars[row].tolist() == [77, 3, 1, 6, 25]
    assert int(columns.grammar_states[row]) == -1
    for name, tensor in vars(columns).items():
        others = [r for r in range(ROWS) if r != row]
        if name != "tables":
            assert torch.equal(tensor[others], vars(before.adjust)[name][others]), name


@pytest.mark.parametrize("extras", [0, ADJUSTS])
def test_an_admission_that_wishes_nothing_switches_its_row_off(extras: int) -> None:
    state = stale_adjusting_state()
    apply_adjusting(state, adjusting_plan(StepShape(3, 16, 3, extras), None))
    assert state.uses.tolist() == [0, 7, 7, 7, 0, 7]


def test_a_new_tenant_has_no_mask_of_the_one_before() -> None:
    """Its own comes with the admission or later; until then its guided queries are held."""
    state = stale_adjusting_state()
    shape = StepShape(3, 16, 3, ADJUSTS, guided=True)
    plan = adjusting_plan(shape, replace(WISHES, grammar=None, guided=True))
    apply_adjusting(state, replace(plan, masks=(None, None)))
    assert state.adjust.mask_lens.tolist() == [0, 7, 7, 7, NOWHERE, 7]
    bits = np.arange(3, dtype=np.int32).tobytes()
    apply_adjusting(state, replace(plan, masks=(None, MaskWrite(9, bits))))
    assert int(state.adjust.mask_lens[4]) == 9 and state.adjust.masks[4].tolist() == [0, 1, 2]


def test_wishes_in_a_round_without_room_for_them_are_refused() -> None:
    with pytest.raises(CapacityError, match="adjustments"):
        apply_adjusting(stale_adjusting_state(), adjusting_plan(StepShape(3, 16, 3), WISHES))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63), 0x1234_5678_9ABC])
def test_every_seed_arrives_whole(seed: int) -> None:
    state = stale_state()
    admission = replace(ADMISSION, seed=seed)
    apply(state, plan_of(admissions=(None, admission)))
    assert int(state.seeds[4]) == seed


def test_a_letter_touches_nothing_but_what_it_names() -> None:
    state, before = stale_state(), stale_state()
    feeds = (Feed(9, (5, 6, 8)), None)
    writes = (PageWrite(2, 0, 3, 11), PageWrite(2, 1, 1, 13), PageWrite(4, 0, 0, 17))
    apply(state, plan_of(feeds=feeds, page_writes=writes))
    before.tokens[2, 9:12] = torch.tensor([5, 6, 8], dtype=torch.int32)
    before.page_tables[0, 2, 3], before.page_tables[1, 2, 1] = 11, 13
    before.page_tables[0, 4, 0] = 17
    for name, tensor in vars(state).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, vars(before)[name]), name


def test_an_empty_letter_changes_nothing() -> None:
    state, before = stale_state(), stale_state()
    apply(state, plan_of(rows=(), admissions=(), feeds=()))
    for name, tensor in vars(state).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, vars(before)[name]), name


def test_more_page_writes_than_fit_are_refused() -> None:
    room = InboxLayout.of(SHAPE, GROUPS, WIDTH).page_writes
    writes = tuple(PageWrite(2, 0, 0, 1) for _ in range(room + 1))
    with pytest.raises(CapacityError, match="page_writes"):
        apply(stale_state(), plan_of(page_writes=writes))
