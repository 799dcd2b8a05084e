# SPDX-License-Identifier: Apache-2.0
"""A projection and what reads it, in one op, is what both are one after another.

The kernels on a GPU, or without one: TRITON_INTERPRET=1 python -m pytest tests/ops/test_reading.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel import ops
from freewheel.graph import trace_on_meta
from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from freewheel.runtime.deterministic import FixedBlocks
from tests.ops.cases import draw
from tests.ops.quantised_cases import block_scaled

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
BOUND = 2**-6 if HAS_GPU else 2e-5
"""Of the largest expected value, or of 1 if that is larger."""

needs_kernels = pytest.mark.skipif(
    not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)
BODIES = {
    "block_add_rms_norm": (ops.block_add_rms_norm, ops.add_norm_apart),
    "wide_route": (ops.wide_route, ops.wide_route_apart),
    "wide_route_best": (ops.wide_route_best, ops.wide_route_best_apart),
}


def call(name: str, tokens: tuple[int, int], inputs: int, dtype: torch.dtype) -> tuple[Any, ...]:
    x = draw(1, *tokens, inputs).to(dtype)
    if name == "block_add_rms_norm":
        residual, norm = draw(3, *tokens, 136).to(dtype), draw(4, 136).to(dtype)
        return (x, *block_scaled(2, 136, inputs), residual, norm, 1e-6)
    weight = draw(2, 48, inputs) / inputs**0.5
    if name == "wide_route_best":
        return (x, weight, draw(3, 48) / 4, 6, 1.5)
    return (x, weight, draw(3, 48) / 4, 4, 2, 6, True, 2.5)


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args)


@needs_kernels
@pytest.mark.parametrize(
    ("tokens", "inputs"), [((1, 3), 2304), ((2, 4), 300), ((3, 7), 1152), ((5, 26), 1280)]
)
def test_the_kernel_adds_and_norms_as_its_steps_do(tokens: tuple[int, int], inputs: int) -> None:
    load_kernels("cuda")
    args = call("block_add_rms_norm", tokens, inputs, DTYPE)
    found = IMPLEMENTATIONS["block_add_rms_norm", "cuda"](*on_device(args))
    double = (args[0].double(), *args[1:3], args[3].double(), args[4].double(), args[5])
    expected = SPECIFICATIONS["block_add_rms_norm"](*double)
    for one, other in zip(found, expected, strict=True):
        error = (one.cpu().double() - other).abs().max().item()
        assert error <= BOUND * max(1.0, other.abs().max().item()), error


@needs_kernels
@pytest.mark.parametrize("name", ["wide_route", "wide_route_best"])
@pytest.mark.parametrize(("tokens", "inputs"), [((1, 3), 300), ((2, 40), 640), ((5, 26), 1100)])
def test_the_kernel_routes_by_the_sum_of_parts(
    tokens: tuple[int, int], inputs: int, name: str
) -> None:
    """Ids of the very logits that the parts add up to; no two are so close that order decides."""
    load_kernels("cuda")
    args = call(name, tokens, inputs, DTYPE)
    weights, ids = IMPLEMENTATIONS[name, "cuda"](*on_device(args))
    expected = SPECIFICATIONS[name](*args)
    assert torch.equal(ids.cpu(), expected[1])
    torch.testing.assert_close(weights.cpu(), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(BODIES))
def test_one_op_is_its_steps_one_after_another(name: str) -> None:
    args = call(name, (2, 3), 300, torch.float32)
    whole = SPECIFICATIONS[name](*args)
    for body in BODIES[name]:
        found = body(*args)
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(BODIES))
def test_in_fixed_blocks_a_token_s_bits_depend_on_no_other(name: str) -> None:
    args = call(name, (3, 9), 300, torch.float32)
    body, _ = BODIES[name]
    with FixedBlocks():
        whole = body(*args)
        first = tuple(a[:1] if isinstance(a, Tensor) and a.shape[:2] == (3, 9) else a for a in args)
        alone = body(*first)
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one[:1], other)


@pytest.mark.parametrize("name", list(BODIES))
def test_shapes_without_values_are_those_of_a_call(name: str) -> None:
    args = call(name, (2, 3), 300, torch.float32)
    body, _ = BODIES[name]
    on_meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in args)
    found, expected = trace_on_meta(body, *on_meta), body(*args)
    assert [(r.shape, r.dtype) for r in found] == [(r.shape, r.dtype) for r in expected]
