# SPDX-License-Identifier: Apache-2.0
"""The rule of choice: greedy and seeded, filtered, and independent of who asks."""

from __future__ import annotations

import math

import pytest
import torch

from freewheel import ops
from freewheel.ops.choosing import filter_logits, gumbel
from freewheel.ops.registry import IMPLEMENTATIONS, SPECIFICATIONS

BODIES = [SPECIFICATIONS["choose"], IMPLEMENTATIONS["choose", "cpu"]]
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def rows_of(*params: dict[str, float], seeds: list[int], stop: int = -1, minimum: int = 0) -> tuple:
    """Per-row tensors of the state, row 0 scratch."""
    every = [{**OFF, "temperature": 0.0}, *({**OFF, **p} for p in params)]

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([p[name] for p in every], dtype=dtype)

    count = len(every)
    stops = torch.full((count, 8), -1, dtype=torch.int32)
    stops[:, 0] = stop
    return (
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        torch.tensor([0, *seeds]),
        stops,
        torch.full((count,), minimum, dtype=torch.int32),
    )


def pick(body, logits, positions, rows, state) -> torch.Tensor:
    return body(logits, positions, torch.tensor(rows, dtype=torch.int32), *state)


@pytest.mark.parametrize("body", BODIES)
def test_temperature_zero_takes_the_lowest_of_the_best(body) -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]]])
    state = rows_of({"temperature": 0.0}, seeds=[1])
    assert pick(body, logits, torch.tensor([[0, 1]]).int(), [1], state).tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_implementation_chooses_as_the_specification(dtype) -> None:
    torch.manual_seed(0)
    params = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.6, "temperature": 1.3},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.9},
    ]
    state = rows_of(*params, seeds=[3, -5, 2**62, 7, 11, 13], stop=2, minimum=12)
    for trial in range(20):
        logits = torch.randn(7, 3, 50, dtype=dtype) * 3
        positions = torch.randint(0, 30, (7, 3), dtype=torch.int32)
        rows = [*torch.randperm(6).add(1).tolist(), 0]
        first, second = (pick(body, logits, positions, rows, state) for body in BODIES)
        assert torch.equal(first, second), trial


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_chosen_from_nan_or_from_nothing(body, temperature: float) -> None:
    logits = torch.randn(3, 2, 40)
    logits[0, 1, 7], logits[1, 0] = math.nan, -math.inf
    logits[2, 0], logits[2, 0, 39] = -math.inf, -5.0
    state = rows_of(
        *({"temperature": temperature, "top_p": 0.9} for _ in range(3)), seeds=[1, 2, 3]
    )
    chosen = pick(body, logits, torch.arange(6).view(3, 2).int(), [1, 2, 3], state).tolist()
    assert chosen[0][0] >= 0 and chosen[0][1] == -1
    assert chosen[1][0] == -1 and chosen[1][1] >= 0
    assert chosen[2][0] == 39


def test_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 2.0])
    draws = 40_000
    state = rows_of({"temperature": 1.5}, seeds=[1234])
    positions = torch.arange(draws, dtype=torch.int32)[None]
    chosen = pick(ops.choose, logits.expand(1, draws, 5), positions, [1], state)
    counts = torch.bincount(chosen.flatten(), minlength=5).double()
    want = (logits.double() / 1.5).softmax(-1) * draws
    chi_square = ((counts - want) ** 2 / want).sum()
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001


def test_seeds_draw_independently_of_one_another() -> None:
    logits = torch.zeros(1, 4).expand(1, 1, 4)
    draws = 4_000
    state = rows_of(*({} for _ in range(draws)), seeds=list(range(draws)))
    rows = list(range(1, draws + 1))
    positions = torch.full((draws, 1), 17, dtype=torch.int32)
    chosen = pick(ops.choose, logits.expand(draws, 1, 4), positions, rows, state)[:, 0]
    pairs = torch.bincount(chosen[:-1] * 4 + chosen[1:], minlength=16).double()
    want = (draws - 1) / 16
    assert ((pairs - want) ** 2 / want).sum() < 37.7  # 15 degrees of freedom, p = 0.001


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(torch.tensor([9]), torch.arange(50, dtype=torch.int32)[None], 4096).double()
    assert noise.isfinite().all()
    count = noise.numel()
    assert abs(noise.mean() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * count)
    assert abs(noise.var() - math.pi**2 / 6) < 0.05
    uniform = (-(-noise).exp()).exp().flatten().sort().values
    assert (uniform - torch.arange(count) / count).abs().max() < 1.95 / math.sqrt(count)


def test_a_choice_depends_on_seed_and_position_alone() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 5, 30)
    positions = torch.tensor([[3, 4, 5, 6, 7]]).int().expand(4, 5).contiguous()
    state = rows_of(*({"top_p": 0.9} for _ in range(4)), seeds=[5, 6, 7, 8])
    together = pick(ops.choose, logits, positions, [1, 2, 3, 4], state)
    for row in range(4):
        for query in range(5):
            alone = pick(
                ops.choose,
                logits[row : row + 1, query : query + 1],
                positions[:1, query : query + 1],
                [row + 1],
                state,
            )
            assert int(alone) == int(together[row, query])
    moved = pick(ops.choose, torch.zeros(1, 200, 30), torch.arange(200)[None].int(), [1], state)
    assert len(set(moved.flatten().tolist())) > 20  # positions draw afresh


def test_filters_keep_exactly_what_they_promise() -> None:
    scaled = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log().expand(1, 1, 5)

    def kept(k: int = 0, p: float = 1.0, m: float = 0.0) -> list[bool]:
        left = filter_logits(scaled, torch.tensor([k]), torch.tensor([p]), torch.tensor([m]))
        return left.isfinite().flatten().tolist()

    assert kept() == [True] * 5
    assert kept(k=2) == [True, True, False, False, False]
    assert kept(p=0.65) == [True, True, False, False, False]
    assert kept(p=0.71) == [True, True, True, False, False]
    assert kept(p=1e-6) == [True, False, False, False, False]
    assert kept(m=0.3) == [True, True, True, False, False]
    assert kept(k=3, p=0.8) == [True, True, False, False, False]  # top_p of what top_k left
    ties = torch.zeros(1, 1, 6)
    two = filter_logits(ties, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert two.isfinite().flatten().tolist() == [True, True, False, False, False, False]


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 40, 100)
    state = rows_of({"temperature": 5.0, "top_k": 1}, seeds=[3])
    chosen = pick(ops.choose, logits, torch.arange(40)[None].int(), [1], state)
    assert torch.equal(chosen, logits.argmax(-1).int())


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_masked_until_the_minimum_length(body, temperature: float) -> None:
    logits = torch.full((1, 6, 4), -50.0)
    logits[..., 2] = 50.0
    state = rows_of({"temperature": temperature}, seeds=[3], stop=2, minimum=10)
    chosen = pick(body, logits, torch.tensor([[6, 7, 8, 9, 10, 11]]).int(), [1], state)[0]
    assert (chosen[:3] != 2).all() and (chosen[3:] == 2).all()
