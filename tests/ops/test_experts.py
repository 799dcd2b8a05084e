# SPDX-License-Identifier: Apache-2.0
"""Routing and the experts it chooses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops import IMPLEMENTATIONS
from freewheel.ops.cpu import dense as cpu_dense
from tests.ops import nobody_cases
from tests.ops.cases import WIDE_DTYPES, Body, assert_close, bodies, draw, generator


def naive_route(
    logits: list[float], bias: list[float], n_group: int, topk_group: int, top_k: int
) -> list[int]:
    """Expert ids of one token, best first, in Python; sigmoids as torch computes them."""
    scores = torch.tensor(logits).sigmoid()
    choice = (scores + torch.tensor(bias)).tolist()
    size = len(logits) // n_group
    groups = [list(range(g * size, (g + 1) * size)) for g in range(n_group)]
    if topk_group < n_group:
        strength = [
            float(torch.tensor([choice[e] for e in group]).topk(2).values.sum()) for group in groups
        ]
        best = sorted(range(n_group), key=lambda g: (-strength[g], g))[:topk_group]
        groups = [groups[g] for g in best]
    allowed = [e for group in groups for e in group]
    return sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]


@bodies("route")
@given(
    seed=st.integers(0, 10_000),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (8, 3)]),
    size=st.integers(2, 4),
    levels=st.sampled_from([1, 3, 1000]),
)
@settings(max_examples=60, deadline=None)
def test_the_best_experts_of_the_best_groups_ties_to_the_lowest(
    body: Body, seed: int, groups: tuple[int, int], size: int, levels: int
) -> None:
    n_group, topk_group = groups
    chance, experts = generator(seed), n_group * size
    logits = torch.randint(-levels, levels + 1, (3, experts), generator=chance) / levels
    bias = torch.randint(-1, 2, (experts,), generator=chance) / 4
    top_k = min(4, topk_group * size)
    weights, ids = body(logits, bias, n_group, topk_group, top_k, True, 2.5)
    assert ids.dtype == torch.int32
    for token in range(3):
        expected = naive_route(logits[token].tolist(), bias.tolist(), n_group, topk_group, top_k)
        assert ids[token].tolist() == expected
    unbiased = logits.sigmoid().gather(-1, ids.long())
    assert_close(weights, unbiased / unbiased.sum(-1, keepdim=True) * 2.5)


@bodies("route")
def test_the_bias_chooses_and_does_not_weigh(body: Body) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    bias = torch.tensor([5.0, 0.0, 0.0, 0.0])
    weights, ids = body(logits, bias, 1, 1, 2, False, 1.0)
    assert ids.tolist() == [[0, 3]]
    assert_close(weights, torch.tensor([[0.5, 1 / (1 + math.exp(-3.0))]]))


@bodies("route")
def test_equal_groups_and_equal_experts_go_to_the_lowest(body: Body) -> None:
    logits, bias = torch.zeros(1, 8), torch.zeros(8)
    _, ids = body(logits, bias, 4, 2, 3, True, 1.0)
    assert ids.tolist() == [[0, 1, 2]]


@bodies("route")
def test_a_group_counts_by_its_two_best(body: Body) -> None:
    """One star does not carry its group."""
    logits = torch.tensor([[9.0, -9.0, -9.0, 2.0, 2.0, -9.0]])
    _, ids = body(logits, torch.zeros(6), 2, 1, 2, True, 1.0)
    assert ids.tolist() == [[3, 4]]


@bodies("route")
def test_a_token_of_nan_still_names_experts(body: Body) -> None:
    """A padding query may hold anything; its ids must be readable."""
    logits = torch.full((1, 8), math.nan)
    _, ids = body(logits, torch.zeros(8), 4, 2, 3, True, 1.0)
    assert ids.ge(0).all() and ids.lt(8).all()


def naive_experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Token by token, lane by lane: x [N, H], ids [N, top_k]."""
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for lane in range(ids.shape[1]):
            expert = int(ids[token, lane])
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weights[token, lane] * (down[expert] @ (F.silu(gate) * up))
    return out


@bodies("grouped_experts")
@pytest.mark.parametrize("dtype", WIDE_DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_are_a_weighted_sum_over_lanes(body: Body, dtype: torch.dtype, tokens: int) -> None:
    """Repeated ids add up; experts without a token stay idle."""
    x = draw(1, tokens, 16, dtype=dtype)
    gate_up, down = draw(2, 5, 12, 16, dtype=dtype), draw(3, 5, 16, 6, dtype=dtype)
    ids = torch.randint(0, 4, (tokens, 3), generator=generator(tokens), dtype=torch.int32)
    weights = draw(4, tokens, 3, dtype=dtype)
    expected = naive_experts(x, gate_up, down, ids, weights)
    actual = body(x.unsqueeze(1), gate_up, down, ids.unsqueeze(1), weights.unsqueeze(1))
    assert_close(actual[:, 0], expected)


@bodies("grouped_experts")
@pytest.mark.parametrize("inner", [6, 9])
def test_a_shared_expert_of_any_width_adds_to_every_token(body: Body, inner: int) -> None:
    x, gate_up, down = draw(1, 7, 1, 16), draw(2, 5, 12, 16), draw(3, 5, 16, 6)
    ids = torch.randint(0, 4, (7, 1, 3), generator=generator(1), dtype=torch.int32)
    weights, shared = draw(4, 7, 1, 3), (draw(5, 2 * inner, 16), draw(6, 16, inner))
    everyone = torch.zeros(7, 1, 1, dtype=torch.int32)
    alone = body(x, shared[0][None], shared[1][None], everyone, torch.ones(7, 1, 1))
    expected = body(x, gate_up, down, ids, weights) + alone
    assert_close(body(x, gate_up, down, ids, weights, *shared), expected)


@bodies("grouped_experts")
@pytest.mark.parametrize("tokens", [2, 40])
def test_an_expert_nobody_chose_adds_nothing_even_if_it_overflows(body: Body, tokens: int) -> None:
    gate_up, down = draw(2, 3, 12, 16), draw(3, 3, 16, 6)
    gate_up[1] = 1e38
    ids = torch.tensor([0, 2], dtype=torch.int32).expand(tokens, 1, 2)
    out = body(draw(1, tokens, 1, 16), gate_up, down, ids, draw(4, tokens, 1, 2))
    assert out.isfinite().all()


@pytest.mark.parametrize("limit", [0, 10**6])
def test_both_ways_of_the_cpu_body_agree(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    x, gate_up, down = (
        draw(n, *s, dtype=torch.float64)
        for n, s in enumerate(((9, 2, 16), (4, 12, 16), (4, 16, 6)))
    )
    ids = torch.rand((9, 2, 4), generator=generator(0)).argsort(-1)[..., :2].int()
    weights = draw(9, 9, 2, 2, dtype=torch.float64)
    usual = cpu_dense.grouped_experts(x, gate_up, down, ids, weights)
    monkeypatch.setattr(cpu_dense, "DENSE_TOKENS", limit)
    assert_close(cpu_dense.grouped_experts(x, gate_up, down, ids, weights), usual)


@pytest.mark.parametrize("tokens", [4, 40])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "name",
    ["grouped_experts", "clamped_experts", "block_experts", "mxfp4_experts", "repacked_experts"],
)
def test_a_choice_of_nobody_adds_nothing_and_reads_nothing(
    name: str, shared: bool, tokens: int
) -> None:
    args = nobody_cases.arguments(name, tokens, torch.float32, shared)
    wanted = nobody_cases.expected(name, args)
    assert not wanted.isnan().any()
    found = IMPLEMENTATIONS[name, "cpu"](*nobody_cases.with_broken_first(name, args))
    torch.testing.assert_close(found, wanted.float(), rtol=2e-5, atol=2e-5)
