# SPDX-License-Identifier: Apache-2.0
"""An index scan that ranks share gives the very list that one rank makes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.nn.indexer import pick
from freewheel.nn.rows import PlainIndexKeys
from freewheel.nn.scan import own_lens, own_pages
from freewheel.spec.mesh import Share
from tests.parallel.threads import on_ranks

PAGE = 4


def case(seed: int, topk: int, spread: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Small whole numbers, in which products are exact: most scores are equal to some others."""
    torch.manual_seed(seed)
    rows_of_state, columns, batch, width, heads, dim = 3, 7, 2, 3, 2, 4

    def whole(*shape: int) -> Tensor:
        return torch.randint(-spread, spread + 1, shape).to(dtype)

    keys = PlainIndexKeys(whole(1 + rows_of_state * columns, PAGE, dim))
    table = 1 + torch.randperm(rows_of_state * columns).int().view(rows_of_state, columns)
    rows = torch.tensor([2, 1], dtype=torch.int32)
    lens = torch.randint(0, columns * PAGE + 1, (batch, width), dtype=torch.int32)
    lens[0, 0] = (0, columns * PAGE, 1)[seed % 3]
    query, gates = whole(batch, width, heads, dim), whole(batch, width, heads)
    return query, gates, keys, table, rows, lens, topk


@given(
    seed=st.integers(0, 9999),
    ranks=st.integers(2, 4),
    topk=st.sampled_from([1, 3, 8, 40]),
    spread=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60, deadline=None)
def test_every_rank_gets_the_list_of_a_scan_that_is_not_shared(
    seed: int, ranks: int, topk: int, spread: int, dtype: torch.dtype
) -> None:
    args = case(seed, topk, spread, dtype)
    alone = pick(*args, scan=Share())
    for own in on_ranks(ranks, lambda rank: pick(*args, scan=Share(rank, ranks))):
        assert own.dtype == alone.dtype and own.numpy().tobytes() == alone.numpy().tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_key_is_on_one_ranks_pages(ranks: int) -> None:
    table = torch.arange(1, 12, dtype=torch.int32)[None]
    lens = torch.arange(0, 45, dtype=torch.int32)[None]
    shares = [Share(rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.stack([own_lens(lens, PAGE, s) for s in shares]).sum(0), lens)
    tables = [own_pages(table, share) for share in shares]
    assert len({one.shape for one in tables}) == 1
    dealt = torch.cat(tables, dim=1)
    assert sorted(dealt[dealt > 0].tolist()) == table[0].tolist()
    for one, share in zip(tables, shares, strict=True):
        assert int(own_lens(lens, PAGE, share).max()) <= one.shape[1] * PAGE


def test_a_key_without_a_number_is_picked_last_whoever_scores_it() -> None:
    query, gates, keys, table, rows, lens, topk = case(5, 8, 2, torch.float32)
    keys.tensor[table[1, 1].long(), 2] = float("nan")
    args = (query, gates, keys, table, rows, torch.full_like(lens, 20), topk)
    alone = pick(*args, scan=Share())
    for own in on_ranks(2, lambda rank: pick(*args, scan=Share(rank, 2))):
        assert torch.equal(own, alone)
