# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary embedding and the gated activation, against their closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from freewheel import ops
from tests.ops.cases import WIDE_DTYPES, Body, assert_close, bodies, draw, ints, rope_angles

DTYPES = pytest.mark.parametrize("dtype", WIDE_DTYPES)
LAYOUTS = pytest.mark.parametrize("interleaved", [False, True])


@bodies("rms_norm")
@DTYPES
def test_an_rms_norm_divides_by_the_root_mean_square(body: Body, dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    root = math.sqrt(25 / 4 + 0.5)
    expected = torch.tensor([[3 / root, 8 / root, 0, 0], [0, 0, 0, 0]], dtype=dtype)
    assert_close(body(x, weight, 0.5), expected)


@bodies("rms_norm")
def test_a_norm_of_bfloat16_is_taken_in_float32_and_rounded_once(body: Body) -> None:
    x, weight = draw(1, 3, 5, 256).bfloat16(), draw(2, 256).bfloat16()
    wide = body(x.float(), weight.float(), 1e-6)
    assert torch.equal(body(x, weight, 1e-6), wide.bfloat16())


@bodies("rms_norm")
def test_a_norm_of_a_slice_is_that_of_its_copy(body: Body) -> None:
    whole, weight = draw(1, 2, 3, 48), draw(2, 32)
    part = whole[..., 8:40]
    assert torch.equal(body(part, weight, 1e-6), body(part.contiguous(), weight, 1e-6))


@bodies("add_rms_norm")
@pytest.mark.parametrize("dtype", [*WIDE_DTYPES, torch.bfloat16])
def test_the_residual_sum_is_returned_and_normed(body: Body, dtype: torch.dtype) -> None:
    x, residual = draw(1, 2, 3, 32, dtype=dtype), draw(2, 2, 3, 32, dtype=dtype)
    weight = draw(3, 32, dtype=dtype)
    normed, total = body(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_close(normed, ops.rms_norm(total, weight, 1e-6))


@bodies("layer_norm")
@DTYPES
def test_a_layer_norm_centres_and_uses_the_biased_variance(body: Body, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 3.0, 5.0, 7.0]], dtype=dtype)  # mean 4, variance 5
    weight, bias = torch.full((4,), 2.0, dtype=dtype), torch.full((4,), 10.0, dtype=dtype)
    scale = 2 / math.sqrt(5 + 0.25)
    expected = torch.tensor([[10 + scale * d for d in (-3, -1, 1, 3)]], dtype=dtype)
    assert_close(body(x, weight, bias, 0.25), expected)


@bodies("silu_mul")
@DTYPES
def test_silu_mul_gates_the_second_half_by_the_first(body: Body, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 2.0, -3.0, 5.0, 7.0, 11.0]], dtype=dtype)
    silu = [g / (1 + math.exp(-g)) for g in (0.0, 2.0, -3.0)]
    expected = torch.tensor([[s * u for s, u in zip(silu, (5, 7, 11), strict=True)]], dtype=dtype)
    assert_close(body(x), expected)


def rotated(body: Body, x: Tensor, position: int, interleaved: bool) -> Tensor:
    """x [D] at `position`."""
    table = rope_angles(64, x.shape[0])
    return body(x.view(1, 1, 1, -1), ints(position)[None], table, 0, interleaved).flatten()


@bodies("rope")
@LAYOUTS
def test_pairs_turn_by_the_angle_of_their_position(body: Body, interleaved: bool) -> None:
    """First elements of all pairs come out first, whichever way they went in."""
    table = rope_angles(64, 6).double()
    cos, sin = table[9].chunk(2)
    x = draw(1, 6, dtype=torch.float64)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 3) for i in range(3)]
    first = [x[a] * cos[i] - x[b] * sin[i] for i, (a, b) in enumerate(pairs)]
    second = [x[b] * cos[i] + x[a] * sin[i] for i, (a, b) in enumerate(pairs)]
    assert_close(rotated(body, x, 9, interleaved), torch.stack(first + second))


@bodies("rope")
@LAYOUTS
def test_products_depend_on_the_distance_alone(body: Body, interleaved: bool) -> None:
    q, k = draw(1, 16, dtype=torch.float64), draw(2, 16, dtype=torch.float64)
    product = [
        float(rotated(body, q, t + 5, interleaved) @ rotated(body, k, t, interleaved))
        for t in (0, 1, 30, 58)
    ]
    assert product == pytest.approx([product[0]] * 4, rel=1e-5)  # the table is float32
    assert float(rotated(body, q, 0, interleaved) @ rotated(body, k, 0, interleaved)) == (
        pytest.approx(float(q @ k), rel=1e-12)
    )


@bodies("rope")
@LAYOUTS
@pytest.mark.parametrize("start", [0, 3, 8])
def test_other_dimensions_pass_through(body: Body, interleaved: bool, start: int) -> None:
    x, positions = draw(1, 2, 3, 4, 16), ints(0, 1, 2, 7, 8, 9).view(2, 3)
    table = rope_angles(16, 8)
    out = body(x, positions, table, start, interleaved)
    assert torch.equal(out[..., :start], x[..., :start])
    assert torch.equal(out[..., start + 8 :], x[..., start + 8 :])
    inner = body(x[..., start : start + 8].contiguous(), positions, table, 0, interleaved)
    assert torch.equal(out[..., start : start + 8], inner)


@bodies("rope")
def test_the_two_layouts_differ(body: Body) -> None:
    x = draw(1, 16)
    assert not torch.allclose(rotated(body, x, 3, True), rotated(body, x, 3, False))


@bodies("rope")
@LAYOUTS
def test_bfloat16_is_rotated_in_float32(body: Body, interleaved: bool) -> None:
    x = draw(1, 64).bfloat16()
    wide = rotated(body, x.float(), 50, interleaved)
    assert torch.equal(rotated(body, x, 50, interleaved), wide.bfloat16())
