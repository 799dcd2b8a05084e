# SPDX-License-Identifier: Apache-2.0
"""Projections and experts over quantised weights equal those over the weights dequantised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops import SPECIFICATIONS, dequantise_blocks, dequantise_mxfp4
from freewheel.ops.cpu import quantised as cpu_quantised
from tests.ops.cases import WIDE_DTYPES, Body, Sizes, assert_close, bodies, draw
from tests.ops.quantised_cases import block_scaled, expert_arguments, shared_blocks

FORMATS = ("block_experts", "mxfp4_experts")


def dense_weights(name: str, args: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] of the arguments of a quantised op."""
    gate_up, gate_up_scale, down, down_scale = args
    if name == "mxfp4_experts":
        up = dequantise_mxfp4(gate_up, gate_up_scale, dtype)
        return up, dequantise_mxfp4(down, down_scale, dtype)
    halves = [
        dequantise_blocks(w, s, dtype=dtype)
        for w, s in zip(gate_up.chunk(2, 1), gate_up_scale.chunk(2, 1), strict=True)
    ]
    return torch.cat(halves, 1), dequantise_blocks(down, down_scale, dtype=dtype)


@pytest.mark.parametrize("dtype", WIDE_DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (128, 128), (300, 200), (129, 257)])
def test_a_projection_is_that_of_the_dequantised_weight(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x, (weight, scale) = draw(1, 2, 3, inputs, dtype=dtype), block_scaled(2, outputs, inputs)
    expected = F.linear(x, dequantise_blocks(weight, scale, dtype=dtype))
    assert_close(SPECIFICATIONS["block_linear"](x, weight, scale), expected)


def test_a_projection_in_bfloat16_rounds_its_result_alone() -> None:
    """The weight times its scale needs more than bfloat16 has; the sum sees all of it."""
    x = draw(1, 4, 256).bfloat16()
    weight, scale = block_scaled(2, 130, 256)
    exact = F.linear(x.double(), dequantise_blocks(weight, scale, dtype=torch.float64))
    found = SPECIFICATIONS["block_linear"](x, weight, scale).double()
    assert ((found - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("block", [(32, 32), (64, 128)])
def test_blocks_may_have_other_sizes(block: tuple[int, int]) -> None:
    weight, scale = block_scaled(2, 200, 136)
    fine = scale.repeat_interleave(128 // block[0], 0).repeat_interleave(128 // block[1], 1)
    fine = fine[: -(-200 // block[0]), : -(-136 // block[1])]
    x = draw(1, 5, 136)
    expected = SPECIFICATIONS["block_linear"](x, weight, scale)
    assert_close(SPECIFICATIONS["block_linear"](x, weight, fine, *block), expected)


@pytest.mark.parametrize("dtype", WIDE_DTYPES)
@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_those_of_the_dequantised_weights(
    name: str, limit: float | None, dtype: torch.dtype
) -> None:
    """Over several blocks, the last of them partly empty."""
    of = Sizes(2, 3, 4, dtype)
    inner, hidden = (160, 192) if name == "mxfp4_experts" else (150, 200)
    args = expert_arguments(name, of, 5, inner, hidden, 2, limit)
    x, ids, shares = args[0], *args[5:7]
    gate_up, down = dense_weights(name, args[1:5], dtype)
    twin = "grouped_experts" if limit is None else "clamped_experts"
    rest = (ids, shares) if limit is None else (ids, shares, limit)
    expected = SPECIFICATIONS[twin](x, gate_up, down, *rest)
    for body in (SPECIFICATIONS[name], getattr(torch.ops.freewheel, name).default):
        assert_close(body(*args), expected)


@bodies("block_experts")
@pytest.mark.parametrize("limit", [None, 0.3])
def test_a_shared_expert_is_one_that_every_token_chooses(body: Body, limit: float | None) -> None:
    args = expert_arguments("block_experts", Sizes(2, 3), 4, 32, 64, 2, limit)
    shared = tuple(t[3].clone() for t in args[1:5])
    ids, shares = args[5] % 3, args[6]
    routed = body(args[0], *args[1:5], ids, shares, limit)
    alone = torch.full((2, 3, 1), 3, dtype=torch.int32)
    every = body(args[0], *args[1:5], alone, torch.ones(2, 3, 1), limit)
    assert_close(body(args[0], *args[1:5], ids, shares, limit, *shared), routed + every)


@bodies("mxfp4_experts")
@pytest.mark.parametrize("limit", [None, 0.3])
def test_a_shared_fp8_expert_adds_what_it_gives_alone(body: Body, limit: float | None) -> None:
    args = expert_arguments("mxfp4_experts", Sizes(2, 3), 4, 32, 64, 2, limit)
    shared, none = shared_blocks(5, 96, 64), torch.zeros(2, 3, 2)
    routed, alone = body(*args), body(*args[:6], none, limit, *shared)
    twin = SPECIFICATIONS["block_experts"]
    own = expert_arguments("block_experts", Sizes(2, 3), 4, 32, 64, 2, limit)
    assert_close(alone, twin(args[0], *own[1:6], none, limit, *shared))
    assert_close(body(*args, *shared), routed + alone)


@bodies("block_experts")
def test_an_expert_nobody_chose_adds_nothing_even_if_it_is_nan(body: Body) -> None:
    args = list(expert_arguments("block_experts", Sizes(2, 3), 4, 32, 64, 2, None))
    args[5] = args[5] // 2 * 2  # only experts 0 and 2
    args[2], args[4] = args[2].clone(), args[4].clone()
    args[2][1], args[4][3] = float("nan"), float("nan")
    assert body(*args).isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_only_chosen_experts_are_dequantised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = list(expert_arguments(name, Sizes(2, 3), 6, 32, 64, 2, None))
    args[5] = args[5] % 2
    seen: list[int] = []
    maker = "block_weights" if name == "block_experts" else "mxfp4_weights"
    make = getattr(cpu_quantised, maker)

    def watched(*weights: Tensor) -> Body:
        of = make(*weights)
        return lambda expert, dtype: (seen.append(expert), of(expert, dtype))[1]

    monkeypatch.setattr(cpu_quantised, maker, watched)
    getattr(cpu_quantised, name)(*args)
    assert seen == [0, 1]
