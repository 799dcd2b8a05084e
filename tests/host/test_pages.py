# SPDX-License-Identifier: Apache-2.0
"""Pools of pages and rows: conservation, quarantine, and no return of what is not owned."""

from __future__ import annotations

import random

import pytest

from freewheel.errors import ConfigError, FreewheelError
from freewheel.host import PageAllocator, RowAllocator
from tests.host.engine import history


def pool(pages: int = 5) -> PageAllocator:
    return PageAllocator(history(), 1 + pages)


def test_scratch_is_never_handed_out_and_the_lowest_goes_first() -> None:
    pages = pool(5)
    assert pages.allocate(2) == (1, 2)
    assert pages.allocate(3) == (3, 4, 5)
    pages.release((4, 2), until_round=-1)
    assert pages.allocate(2) == (2, 4)


def test_a_pool_of_scratch_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="rows"):
        RowAllocator(1)


def test_more_than_is_free_is_refused_and_changes_nothing() -> None:
    pages = pool(3)
    with pytest.raises(FreewheelError, match="4 asked for, 3 free"):
        pages.allocate(4)
    assert (pages.free, pages.owned) == (3, 0)


def test_a_released_page_is_free_only_after_its_last_round_is_collected() -> None:
    pages = pool(3)
    pages.release(pages.allocate(2), until_round=7)
    assert (pages.free, pages.owned, pages.quarantined) == (1, 0, 2)
    pages.collected(6)
    assert pages.free == 1
    pages.collected(7)
    assert (pages.free, pages.quarantined) == (3, 0)


def test_a_page_whose_last_round_has_been_collected_is_free_at_once() -> None:
    pages = pool(3)
    pages.collected(4)
    pages.release(pages.allocate(1), until_round=4)
    assert pages.free == 3


@pytest.mark.parametrize("wrong", [(2,), (0,), (9,), (1, 1), (1, 3)])
def test_a_page_that_is_not_owned_cannot_be_released(wrong: tuple[int, ...]) -> None:
    pages = pool(3)
    pages.allocate(1)
    with pytest.raises(FreewheelError):
        pages.release(wrong, until_round=0)
    assert (pages.free, pages.owned, pages.quarantined) == (2, 1, 0)


def test_a_second_release_is_refused_in_quarantine_and_after_it() -> None:
    rows = RowAllocator(4)
    row = rows.allocate(1)
    rows.release(row, until_round=1)
    for collected in (0, 1):
        rows.collected(collected)
        with pytest.raises(FreewheelError, match="not owned"):
            rows.release(row, until_round=2)


def test_random_use_conserves_every_page() -> None:
    rng = random.Random(1)
    pages, owned = pool(40), list[int]()
    for round_id in range(2000):
        owned += pages.allocate(rng.randint(0, min(6, pages.free)))
        back = [owned.pop(rng.randrange(len(owned))) for _ in range(rng.randint(0, len(owned)))]
        pages.release(back, until_round=round_id + rng.randint(0, 3))
        pages.collected(round_id)
        pages.check()
        assert pages.owned == len(owned)
        assert pages.free + pages.owned + pages.quarantined == pages.total == 40
