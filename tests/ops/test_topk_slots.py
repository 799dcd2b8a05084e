# SPDX-License-Identifier: Apache-2.0
"""Selection: exact, in a stated order, and blind to what lies past a row's length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel import ops
from freewheel.ops.cpu import attention as cpu_attention
from tests.ops.cases import Body, Pages, bodies, draw, draw_pages, generator, ints

NAME = "topk_slots"


def naive(logits: Tensor, pages: Pages, k: int) -> list[list[list[int]]]:
    """Sort (score, position) pairs in Python."""
    picked: list[list[list[int]]] = []
    for b, lens in enumerate(pages.kv_lens.tolist()):
        picked.append([])
        for w, length in enumerate(lens):
            scores = [-math.inf if math.isnan(x) else x for x in logits[b, w, :length].tolist()]
            best = sorted(range(length), key=lambda t: (-scores[t], t))[:k]
            slots = [int(pages.slots_of(b, torch.tensor(t))) for t in sorted(best)]
            picked[b].append(slots + [-1] * (k - len(slots)))
    return picked


def one_row(length: int, size: int = 4, columns: int = 16) -> Pages:
    """One query over pages 1, 2, 3 ...: the slot of position t is size + t."""
    table = torch.arange(columns, dtype=torch.int32)[None] + 1
    return Pages(table, ints(0), ints(length)[None], size)


def select(body: Body, logits: Tensor, pages: Pages, k: int) -> Tensor:
    return body(logits, pages.table, pages.rows, pages.kv_lens, pages.size, k)


def positions(body: Body, logits: list[float], k: int, length: int | None = None) -> list[int]:
    """Selected positions of one query; the page table's tail is full of NaN logits."""
    pages = one_row(len(logits) if length is None else length)
    row = torch.full((1, 1, pages.length), math.nan)
    row[0, 0, : len(logits)] = torch.tensor(logits)
    return [slot - pages.size for slot in select(body, row, pages, k)[0, 0].tolist() if slot >= 0]


@bodies(NAME)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 4),
    width=st.integers(1, 5),
    columns=st.integers(1, 9),
    size=st.sampled_from([1, 4, 8, 12]),
    k=st.integers(1, 40),
    levels=st.sampled_from([1, 2, 5, 1000]),
)
@settings(max_examples=60, deadline=None)
def test_the_best_positions_in_ascending_order_ties_to_the_lowest(
    body: Body, seed: int, batch: int, width: int, columns: int, size: int, k: int, levels: int
) -> None:
    """Few levels make many ties; one score in eight is NaN or infinite."""
    pages = draw_pages(seed, batch, width, columns, size)
    chance = generator(seed)
    shape = (batch, width, pages.length)
    logits = torch.randint(-levels, levels + 1, shape, generator=chance).float()
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    which = torch.randint(0, 4, shape, generator=chance)
    logits = torch.where(torch.rand(shape, generator=chance) < 0.125, odd[which], logits)
    assert select(body, logits, pages, k).tolist() == naive(logits, pages, k)


@bodies(NAME)
def test_equal_scores_go_to_the_lowest_positions(body: Body) -> None:
    assert positions(body, [1.0] * 20, k=5) == [0, 1, 2, 3, 4]
    assert positions(body, [0, 3, 1, 3, 1, 1, 2], k=4) == [1, 2, 3, 6]
    assert positions(body, [0.0, -0.0, 0.0, -0.0, 5.0], k=3) == [0, 1, 4]


@bodies(NAME)
def test_nan_ranks_below_every_number(body: Body) -> None:
    nan = math.nan
    assert positions(body, [nan, 2.0, nan, -1e30, nan], k=2) == [1, 3]
    assert positions(body, [nan] * 6, k=2) == [0, 1]
    assert positions(body, [nan, -math.inf, nan], k=2) == [0, 1]


@bodies(NAME)
def test_a_short_row_beside_a_long_one_selects_everything_even_at_minus_infinity(
    body: Body,
) -> None:
    columns = torch.arange(16, dtype=torch.int32)[None] + 1
    pages = Pages(columns, ints(0), ints(60, 5)[None], 4)
    logits = draw(0, 1, 2, 64)
    logits[0, 1] = -math.inf
    logits[0, 1, 3] = 1.0
    assert select(body, logits, pages, 8)[0, 1].tolist() == [4, 5, 6, 7, 8, -1, -1, -1]


@bodies(NAME)
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 40])
def test_a_short_row_selects_everything_and_a_long_one_exactly_k(body: Body, length: int) -> None:
    logits = draw(length, 64).tolist()
    chosen = positions(body, logits, k=16, length=length)
    assert len(chosen) == min(length, 16)
    assert chosen == sorted(set(chosen))
    if length <= 16:
        assert chosen == list(range(length))


@bodies(NAME)
def test_k_beyond_the_table_is_padded(body: Body) -> None:
    pages = one_row(10, columns=3)
    slots = select(body, draw(0, 1, 1, pages.length), pages, 30)
    assert slots[0, 0].tolist() == [*range(4, 14), *[-1] * 20]


@bodies(NAME)
def test_lanes_past_the_length_are_dead_whatever_lies_there(body: Body) -> None:
    """Logits, page numbers: NaN, the best score of all, 2^30."""
    pages = draw_pages(7, 4, 5, 6, 4)
    logits = draw(1, 4, 5, pages.length)
    clean = select(body, logits, pages, 9)
    beyond = torch.arange(pages.length) >= pages.kv_lens[..., None]
    table = torch.full_like(pages.table, 2**30)
    for b, row in enumerate(pages.rows.tolist()):
        columns = -(-int(pages.kv_lens[b].max()) // 4)
        table[row, :columns] = pages.table[row, :columns]
    for poison in (math.nan, math.inf, 1e30):
        dirty = Pages(table, pages.rows, pages.kv_lens, 4)
        assert torch.equal(select(body, logits.masked_fill(beyond, poison), dirty, 9), clean)


@bodies(NAME)
def test_logits_are_left_as_they_were(body: Body) -> None:
    pages = draw_pages(3, 2, 3, 6, 4)
    logits = draw(1, 2, 3, pages.length)
    before = logits.clone()
    select(body, logits, pages, 5)
    assert torch.equal(logits, before)


@bodies(NAME)
def test_the_same_scores_give_the_same_list_every_time(body: Body) -> None:
    pages = draw_pages(5, 3, 4, 15, 4)
    logits = draw(1, 3, 4, pages.length).round()
    first = select(body, logits, pages, 16)
    assert all(torch.equal(select(body, logits, pages, 16), first) for _ in range(20))


@pytest.mark.parametrize("step", [1, 7, 96])
def test_selection_does_not_depend_on_how_the_cpu_body_cuts_it(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    pages = draw_pages(2, 1, 96, 32, 4)
    logits = draw(1, 1, 96, pages.length).mul(3).round()
    whole = select(ops.topk_slots, logits, pages, 16)
    monkeypatch.setattr(cpu_attention, "SELECT_PIECE", step)
    assert torch.equal(select(ops.topk_slots, logits, pages, 16), whole)


@bodies(NAME)
@pytest.mark.parametrize("size", [4, 8, 12])
def test_positions_and_slots_are_one_to_one(body: Body, size: int) -> None:
    pages = draw_pages(size, 3, 1, 3, size)
    full = Pages(pages.table, pages.rows, torch.full((3, 1), 3 * size, dtype=torch.int32), size)
    slots = select(body, draw(0, 3, 1, 3 * size), full, 3 * size)
    assert slots.unique().numel() == 3 * 3 * size
    assert int(slots.min()) >= size, "scratch page 0 belongs to nobody"


@bodies(NAME)
def test_slots_of_a_large_pool_are_exact(body: Body) -> None:
    """Page 1_677_721 of 1280 positions: the last slots that fit 31 bits."""
    last = (2**31 - 1) // 1280 - 1
    pages = Pages(ints(3277, last)[None], ints(0), ints(2 * 1280)[None], 1280)
    slots = select(body, draw(0, 1, 1, 2560), pages, 2560)[0, 0].long()
    page = torch.tensor([3277, last])[:, None] * 1280
    assert torch.equal(slots, (page + torch.arange(1280)).flatten())
