# SPDX-License-Identifier: Apache-2.0
"""Collectives are ops: they have fakes, can be recorded, and do what their specification says."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel import ops
from freewheel.errors import ConfigError
from freewheel.graph import TapeGraph, no_host_sync, trace_on_meta
from freewheel.ops import MEETINGS, SPECIFICATIONS
from freewheel.runtime.deterministic import FixedBlocks
from freewheel.runtime.rehearsal import Blank
from tests.parallel.threads import on_ranks


class Echo:
    """A group whose other ranks all have what this one has."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def sum_into(self, x: Tensor) -> None:
        x.mul_(self.ranks)

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.ranks)

    def scatter_sum(self, x: Tensor) -> Tensor:
        return self.ranks * x[0]

    def exchange(self, x: Tensor) -> Tensor:
        return torch.stack([x[0]] * self.ranks)


@pytest.fixture(autouse=True)
def three_echoes() -> object:
    ops.join_group("echo", Echo(3))
    yield
    ops.leave_group("echo")


def test_every_rank_gets_the_same_sum_and_all_parts_in_order() -> None:
    every = torch.randn(3, 2, 4, dtype=torch.float64)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        own = every[rank].clone()
        ops.all_reduce(own, "tp")
        return own, ops.all_gather(every[rank], 3, "tp")

    for total, parts in on_ranks(3, work):
        assert torch.equal(total, every.sum(0))
        assert torch.equal(parts, torch.cat(tuple(every), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_three_ranks_are_made_in_their_order_in_deterministic_mode(
    dtype: torch.dtype,
) -> None:
    """Of numbers whose sum depends on the order, for one token as for many."""
    every = torch.tensor([2.0**30, 1.0, -(2.0**30)]).to(dtype)[:, None, None].expand(3, 40, 8)

    def work(rank: int, tokens: int) -> tuple[Tensor, Tensor]:
        own = every[rank, :tokens].clone()
        with FixedBlocks():
            ops.all_reduce(own, "tp")
            part = ops.scatter_sum(every[rank, None, :tokens].expand(3, -1, -1).clone(), "tp")
        return own, part

    expected = (every[0].float() + every[1] + every[2]).to(dtype)
    assert not expected.any(), "the middle rank's is lost in this order alone"
    for tokens in (1, 40):
        for found in on_ranks(3, lambda rank, tokens=tokens: work(rank, tokens)):
            for total in found:
                assert torch.equal(total, expected[:tokens])


def test_each_rank_gets_its_part_of_the_sum_and_what_others_have_for_it() -> None:
    every = torch.randn(3, 3, 4, dtype=torch.float64)  # of rank, for rank

    def work(rank: int) -> tuple[Tensor, Tensor]:
        return ops.scatter_sum(every[rank], "tp"), ops.all_to_all(every[rank], "tp")

    for rank, (total, parts) in enumerate(on_ranks(3, work)):
        assert torch.equal(total, every.sum(0)[rank])
        assert torch.equal(parts, every[:, rank])


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_no_token_is_dropped_on_its_way_to_its_experts(
    tokens: int, ranks: int, top_k: int, seed: int
) -> None:
    """Each rank's experts are e -> x * (e + 1), so the whole is known in advance."""
    torch.manual_seed(seed)
    count = 2
    x = torch.randint(-9, 9, (tokens, 5)).double()
    ids = torch.randint(0, ranks * count, (tokens, top_k), dtype=torch.int32)
    if seed % 3 == 0:
        ids.fill_(0)  # all to one rank
    weights = torch.randint(1, 5, (tokens, top_k)).double()
    sent, own, shares, order = ops.dispatch_tokens(x, ids, weights, 0, count, count, ranks)
    assert sent.shape == (ranks, tokens, 5) and int(own.min()) >= -1 and int(own.max()) < count
    assert not shares[own < 0].any() and int((own >= 0).sum()) == tokens * top_k
    assert torch.equal(order.sort(dim=1).values, torch.arange(tokens).int().expand(ranks, -1))
    first = count * torch.arange(ranks)[:, None, None]
    made = ((own + first + 1) * shares).sum(-1, keepdim=True) * sent
    expected = ((ids + 1) * weights).sum(-1, keepdim=True) * x
    assert torch.equal(ops.combine_tokens(made, order), expected)
    for rank in range(ranks):
        goes = ((ids // count) == rank).any(-1)
        live = int(goes.sum())
        assert torch.equal(sent[rank, :live], x[goes]) and not sent[rank, live:].any()


def test_a_vocabulary_in_parts_gives_the_rows_of_the_whole_table() -> None:
    table, tokens = torch.randn(12, 5), torch.randint(0, 12, (2, 7), dtype=torch.int32)
    parts = [ops.split_embedding(tokens, table[n : n + 4], n) for n in (0, 4, 8)]
    assert torch.equal(parts[0] + parts[1] + parts[2], table[tokens.long()])


def test_experts_dealt_out_to_ranks_add_up_to_all_of_them() -> None:
    torch.manual_seed(0)
    x, gate_up = torch.randn(2, 3, 8).double(), torch.randn(6, 8, 8).double()
    down, weights = torch.randn(6, 8, 4).double(), torch.rand(2, 3, 2).double()
    ids = torch.randint(0, 6, (2, 3, 2), dtype=torch.int32)
    whole = ops.grouped_experts(x, gate_up, down, ids, weights)
    total = torch.zeros_like(whole)
    for first in (0, 2, 4):
        own = ops.own_experts(ids, weights, first, 2)
        held = slice(first, first + 2)
        total += ops.grouped_experts(x, gate_up[held], down[held], *own)
    torch.testing.assert_close(total, whole)


def test_a_group_that_nobody_joined_is_named() -> None:
    with pytest.raises(ConfigError, match="no group 'nowhere'"):
        ops.all_reduce(torch.zeros(2), "nowhere")


def test_collectives_are_recorded_and_read_nothing() -> None:
    x, out = torch.ones(2, 4), torch.zeros(2, 12)

    def round_() -> None:
        own = x + 1
        ops.all_reduce(own, "echo")
        out.copy_(ops.all_gather(own, 3, "echo"))

    graph = TapeGraph((x, out))
    with no_host_sync():
        graph.capture(round_)
    assert torch.equal(out, torch.zeros(2, 12))  # recorded, not run
    x.fill_(2)
    graph.replay()
    assert torch.equal(out, torch.full((2, 12), 9.0))
    assert "freewheel::all_reduce" in graph.listing and "freewheel::all_gather" in graph.listing


def test_fakes_give_the_shapes_of_the_ops() -> None:
    weight, x = torch.zeros(4, 5, device="meta"), torch.zeros(2, 3, 5, device="meta")
    tokens = torch.zeros(2, 3, dtype=torch.int32, device="meta")

    def made() -> tuple[Tensor, ...]:
        ops.all_reduce(x, "unjoined")
        rows = ops.split_embedding(tokens, weight, 4)
        parts = (ops.all_to_all(x, "unjoined"), ops.scatter_sum(x, "unjoined"))
        sent = ops.dispatch_tokens(x[0], tokens.T, x[0, :, :2], 0, 2, 2, 4)
        whole = ops.combine_tokens(sent[0], sent[3])
        assert [t.shape for t in (*parts, *sent, whole)] == [
            *((2, 3, 5), (3, 5), (4, 3, 5), (4, 3, 2), (4, 3, 2), (4, 3), (3, 5)),
        ]
        return (ops.all_gather(x, 8, "unjoined"), rows, *ops.own_experts(tokens, x[..., 0], 0, 2))

    gathered, rows, ids, weights = trace_on_meta(made)
    assert (gathered.shape, rows.shape) == ((2, 3, 40), (2, 3, 5))
    assert (ids.shape, ids.dtype, weights.dtype) == ((2, 3), torch.int32, torch.float32)


def test_a_rank_that_rehearses_waits_for_nobody() -> None:
    """In a group that this process is not in, an op that met others would be refused."""
    x = torch.ones(3, 2, 4)
    with torch.inference_mode(), Blank("cpu"):
        ops.all_reduce(x, "nobody")
        found = [
            ops.all_gather(x, 3, "nobody"),
            ops.scatter_sum(x, "nobody"),
            ops.all_to_all(x, "nobody"),
            ops.scatter_sum_in_order(x, "nobody"),
        ]
        ops.all_reduce_in_order(x, "nobody")
    assert [tuple(one.shape) for one in found] == [(3, 2, 12), (2, 4), (3, 2, 4), (2, 4)]
    assert not any(one.any() for one in found)
    takes_group = {n for n in SPECIFICATIONS if "group" in signature(SPECIFICATIONS[n]).parameters}
    assert takes_group == MEETINGS
