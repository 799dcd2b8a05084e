# SPDX-License-Identifier: Apache-2.0
"""The beginning of sparse attention in one op is what its steps are one after another.

The kernel on a GPU, or without one: TRITON_INTERPRET=1 python -m pytest tests/ops/test_openings.py
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
from tests.ops.cases import draw, rope_angles
from tests.ops.quantised_cases import block_scaled

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
QUERIES, KEYS, RANK, ROPE, GATES = 72, 24, 40, 8, 5


def call(
    tokens: tuple[int, int], inputs: int, dtype: torch.dtype, keys: int = KEYS, gates: int = GATES
) -> tuple[Any, ...]:
    """Arguments of a call: every token writes a row of its own."""
    count = tokens[0] * tokens[1]
    weight, scale = block_scaled(2, QUERIES + keys + RANK + ROPE, inputs)
    return (
        torch.full((2 + -(-count // 8), 8, RANK + ROPE), 7.0, dtype=dtype),
        draw(1, *tokens, inputs).to(dtype),
        weight,
        scale,
        draw(3, gates, inputs) / inputs**0.5,
        draw(4, QUERIES).to(dtype),
        draw(5, RANK).to(dtype),
        1e-6,
        (torch.arange(count, dtype=torch.int32) * 5 % 200).view(tokens),
        rope_angles(200, ROPE),
        True,
        (torch.arange(count) + 8).view(tokens),
    )


def outputs(body: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The cache behind the call, and what it returned."""
    args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    return (args[0], *body(*args))


def doubled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Floats in float64, but for scales, tables and what is stored in FP8."""
    places = (0, 1, 4, 5, 6)
    return tuple(a.double() if i in places else a for i, a in enumerate(args))


@pytest.mark.skipif(
    not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)
@pytest.mark.parametrize(
    ("tokens", "inputs", "keys", "gates"),
    [
        ((1, 4), 2304, KEYS, GATES),
        ((2, 4), 1152, KEYS, 4),
        ((1, 1), 2100, 0, 0),
        ((3, 1), 2176, KEYS, 1),
        ((3, 7), 1152, KEYS, GATES),
        ((2, 35), 640, KEYS, GATES),
        ((5, 13), 1152, 0, 40),
        ((5, 13), 256, KEYS, 0),
    ],
)
def test_the_kernel_agrees(tokens: tuple[int, int], inputs: int, keys: int, gates: int) -> None:
    load_kernels("cuda")
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    bound = 2**-6 if HAS_GPU else 2e-5
    args = call(tokens, inputs, dtype, keys, gates)
    given = tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args)
    found = outputs(IMPLEMENTATIONS["block_open_latents", "cuda"], given)
    expected = outputs(SPECIFICATIONS["block_open_latents"], doubled(args))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        if one.numel():
            error = (one.cpu().double() - other).abs().max().item()
            assert error <= bound * max(1.0, other.abs().max().item()), error


@pytest.mark.parametrize("keys", [0, KEYS])
def test_one_op_is_its_steps_one_after_another(keys: int) -> None:
    args = call((2, 3), 300, torch.float32, keys)
    whole = outputs(ops.block_open_latents, args)
    for apart in (ops.open_latents_apart, SPECIFICATIONS["block_open_latents"]):
        for one, other in zip(whole, outputs(apart, args), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_in_fixed_blocks_a_token_s_bits_depend_on_no_other() -> None:
    """The op is taken apart there, and each of its steps keeps one order of sums."""
    args = call((3, 4), 300, torch.float32)
    with FixedBlocks():
        whole = outputs(ops.block_open_latents, args)
        first = tuple(a[:1] if isinstance(a, Tensor) and a.shape[:2] == (3, 4) else a for a in args)
        alone = outputs(ops.block_open_latents, first)
    for one, other in zip(whole[1:], alone[1:], strict=True):
        assert torch.equal(one[:1], other)


def test_shapes_without_values_are_those_of_a_call() -> None:
    args = call((2, 3), 300, torch.float32)
    expected = outputs(ops.block_open_latents, args)[1:]
    on_meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in args)
    found = trace_on_meta(ops.block_open_latents, *on_meta)
    assert [(r.shape, r.dtype) for r in found] == [(r.shape, r.dtype) for r in expected]
