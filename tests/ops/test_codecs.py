# SPDX-License-Identifier: Apache-2.0
"""The stored forms of quantised weights, code point by code point."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.ops import dequantise_blocks, dequantise_mxfp4, quantise_blocks, quantise_mxfp4
from freewheel.ops.codecs import decode_e2m1, decode_e8m0, encode_e2m1, encode_e8m0, unpack_fp4
from tests.ops.cases import draw

BYTES = torch.arange(256).to(torch.uint8)
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def naive_e4m3(code: int) -> float:
    """Sign, four exponent bits biased by 7, three of mantissa; 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = (-1.0) ** (code >> 7), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def same(actual: Tensor, expected: list[float]) -> bool:
    """Equal, NaN for NaN and zero for zero of the same sign."""
    wanted = torch.tensor(expected, dtype=torch.float64)
    values = actual.double().flatten()
    signs = torch.equal(values.signbit()[~wanted.isnan()], wanted.signbit()[~wanted.isnan()])
    return signs and torch.equal(values.nan_to_num(9e9), wanted.nan_to_num(9e9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_fp8_code_is_its_value_times_the_scale(dtype: torch.dtype) -> None:
    weight = BYTES.view(torch.float8_e4m3fn).view(1, 256)
    found = dequantise_blocks(weight, torch.tensor([[0.25, 8.0]]), dtype=dtype)
    assert found.dtype == dtype
    assert same(found, [naive_e4m3(c) * (0.25 if c < 128 else 8.0) for c in range(256)])


def test_every_e8m0_code_is_a_power_of_two_or_nan() -> None:
    expected = [2.0 ** (code - 127) for code in range(255)] + [math.nan]
    assert same(decode_e8m0(BYTES), expected)
    assert torch.equal(encode_e8m0(decode_e8m0(BYTES[:255])), BYTES[:255])
    assert same(decode_e8m0(BYTES.view(torch.float8_e8m0fnu)), expected)


def test_every_pair_of_fp4_codes_comes_out_low_nibble_first() -> None:
    values = FP4_VALUES + [-v for v in FP4_VALUES]
    expected = [v for byte in range(256) for v in (values[byte & 15], values[byte >> 4])]
    assert same(unpack_fp4(BYTES), expected)
    assert torch.equal(encode_e2m1(decode_e2m1(BYTES[:16])), BYTES[:16])


@given(value=st.floats(-8, 8, width=32))
def test_an_fp4_code_is_the_nearest_and_of_two_the_even_one(value: float) -> None:
    code = int(encode_e2m1(torch.tensor([value])))
    distance = [abs(abs(value) - v) for v in FP4_VALUES]
    nearest = [c for c in range(8) if distance[c] == min(distance)]
    assert code & 7 == (nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0))
    assert code >> 3 == int(math.copysign(1, value) < 0)


@given(exponent=st.integers(-126, 126), fraction=st.floats(1, 2, exclude_max=True, width=32))
def test_e8m0_rounds_up_to_a_power_of_two(exponent: int, fraction: float) -> None:
    value = fraction * 2.0**exponent
    up = float(decode_e8m0(encode_e8m0(torch.tensor([value], dtype=torch.float64))))
    assert value <= up < 2 * value
    assert math.frexp(up)[0] == 0.5


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 300)),
    block=st.sampled_from([(128, 128), (32, 32), (64, 128)]),
    power_of_two=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_a_block_s_error_is_bounded_by_its_largest_value(
    shape: tuple[int, int, int], block: tuple[int, int], power_of_two: bool, seed: int
) -> None:
    weight = draw(seed, *shape) * 2.0 ** (seed % 40 - 20)
    stored, scale = quantise_blocks(weight, *block, power_of_two)
    assert stored.shape == weight.shape and stored.dtype == torch.float8_e4m3fn
    assert scale.shape == (shape[0], -(-shape[1] // block[0]), -(-shape[2] // block[1]))
    found = dequantise_blocks(stored, scale, *block)
    assert (found - weight).abs().max() <= weight.abs().max() * (1 + power_of_two) / 28
    relative = (found - weight).abs() / weight.abs()
    near = weight.abs() > found.abs().max() * 2**-10  # far from subnormal
    assert relative[near].numel() == 0 or relative[near].max() <= 2.0**-4 + 1e-6
    if power_of_two:
        assert torch.equal(scale.frexp().mantissa, torch.full_like(scale, 0.5))


def test_quantising_what_was_quantised_changes_nothing() -> None:
    stored, scale = quantise_blocks(draw(1, 200, 300), power_of_two=True)
    stored[::128, ::128] = 448.0  # every block uses its whole range
    dense = dequantise_blocks(stored, scale)
    again, scale_again = quantise_blocks(dense, power_of_two=True)
    assert torch.equal(scale, scale_again)
    assert torch.equal(stored.view(torch.uint8), again.view(torch.uint8))
    packed, codes = quantise_mxfp4(draw(2, 7, 96))
    dense = dequantise_mxfp4(packed, codes)
    assert torch.equal(dequantise_mxfp4(*quantise_mxfp4(dense)), dense)


@given(seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_no_mxfp4_value_saturates_and_none_is_off_by_more_than_a_step(seed: int) -> None:
    weight = draw(seed, 3, 5, 64) * 2.0 ** (seed % 60 - 30)
    packed, scale = quantise_mxfp4(weight)
    assert packed.shape == (3, 5, 32) and scale.shape == (3, 5, 2)
    found = dequantise_mxfp4(packed, scale).unflatten(-1, (2, 32))
    wanted = weight.unflatten(-1, (2, 32))
    step = decode_e8m0(scale)[..., None]  # between 4 and 6 values lie two steps of it apart
    assert ((found - wanted).abs() <= step).all()
    assert (wanted.abs() <= 6 * step).all() and (wanted.abs().amax(-1) > 3 * step[..., 0]).all()


def test_zeros_keep_a_scale_of_one() -> None:
    stored, scale = quantise_blocks(torch.zeros(130, 5), power_of_two=True)
    assert torch.equal(scale, torch.ones(2, 1)) and not dequantise_blocks(stored, scale).any()
    packed, codes = quantise_mxfp4(torch.zeros(2, 32))
    assert torch.equal(codes, torch.full((2, 1), 127, dtype=torch.uint8)) and not packed.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.zeros(4, 32)
    weight[1, 2] = bad
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantise_blocks(weight)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantise_mxfp4(weight)


def test_inputs_that_fill_no_group_are_refused() -> None:
    with pytest.raises(CheckpointError, match="33 inputs"):
        quantise_mxfp4(torch.zeros(4, 33))


def test_a_scale_of_nan_shows_in_its_block_alone() -> None:
    scale = torch.ones(2, 2)
    scale[1, 0] = math.nan
    found = dequantise_blocks(torch.ones(130, 130).to(torch.float8_e4m3fn), scale)
    assert found[128:, :128].isnan().all() and int(found.isnan().sum()) == 2 * 128
    codes = torch.tensor([[127, 255]], dtype=torch.uint8)
    values = dequantise_mxfp4(torch.full((1, 32), 0x22, dtype=torch.uint8), codes)
    assert torch.equal(values[:, :32], torch.ones(1, 32)) and values[:, 32:].isnan().all()
