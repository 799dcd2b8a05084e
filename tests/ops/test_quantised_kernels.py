# SPDX-License-Identifier: Apache-2.0
"""The Triton bodies over quantised weights against the specifications in float64.

On a GPU, or without one: TRITON_INTERPRET=1 python -m pytest tests/ops/test_quantised_kernels.py
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from tests.ops import nobody_cases
from tests.ops.cases import Sizes, draw
from tests.ops.kernel_device import DEVICE, needs_kernels
from tests.ops.quantised_cases import block_scaled, expert_arguments, shared_blocks

pytestmark = needs_kernels
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
BOUND = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
"""Of the largest expected value, or of 1 if that is larger."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    load_kernels("cuda")
    yield


def check(name: str, args: tuple[Any, ...]) -> None:
    """The kernel on `args` against the specification in float64 on the CPU."""
    given = tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args)
    found = IMPLEMENTATIONS[name, "cuda"](*given).cpu()
    expected = SPECIFICATIONS[name](args[0].double(), *args[1:])
    assert found.shape == expected.shape and found.dtype == args[0].dtype
    assert torch.equal(found.isfinite(), expected.isfinite())
    error = (found.double() - expected).abs().max().item()
    assert error <= BOUND[found.dtype] * max(1.0, expected.abs().max().item()), error


@DTYPES
@pytest.mark.parametrize("tokens", [1, 12, 32, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(136, 384), (40, 1000), (129, 256)])
def test_projections_agree(outputs: int, inputs: int, tokens: int, dtype: torch.dtype) -> None:
    x = draw(1, 1, tokens, inputs).to(dtype)
    check("block_linear", (x, *block_scaled(2, outputs, inputs)))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 12, 130])
def test_kernels_that_keep_one_order_agree(tokens: int, dtype: torch.dtype) -> None:
    x = draw(1, 1, tokens, 384).to(dtype)
    check("block_linear", (x, *block_scaled(2, 136, 384), 128, 128, True))
    of = Sizes(1, tokens, 2, dtype)
    args = expert_arguments("block_experts", of, 6, 128, 256, 3, 0.4)
    check("block_experts", (*args, *shared_blocks(4, 128, 256), True))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("inputs", [384, 1280, 2048, 2560])
def test_projections_whose_weights_wait_agree_in_the_order_of_others(
    inputs: int, parts: int
) -> None:
    """Of a few tokens, in as many parts as another kernel makes of more."""
    quantised: Any = importlib.import_module("freewheel.ops.cuda.quantised")
    held: Any = importlib.import_module("freewheel.ops.cuda.held_products")
    x, own = draw(1, 1, 5, inputs), block_scaled(2, 136, inputs)
    tile = held.held_tile(5, 136, inputs, parts)
    assert (tile is None) == (inputs == 2560 and parts == 1)
    if tile is None:
        return
    given = quantised.Given(*(a.to(DEVICE) for a in (x, *own)), 5, 136, inputs, 128, 128)
    found = quantised.launch(given, x.new_empty((1, 5, 136), device=DEVICE), tile).cpu()
    expected = SPECIFICATIONS["block_linear"](x.double(), *own)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("block", [(32, 32), (64, 128), (128, 96)])
def test_projections_agree_in_blocks_of_other_sizes(
    block: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, _ = block_scaled(2, 200, 192)
    scale = draw(3, -(-200 // block[0]), -(-192 // block[1])).exp2()
    for tokens in (3, 40):
        check("block_linear", (draw(1, tokens, 192).to(dtype), weight, scale, *block))


@pytest.mark.parametrize("tokens", [2, 40])
def test_every_finite_code_is_read_as_its_value(tokens: int) -> None:
    """Subnormal numbers and the largest among them, alone in their sum."""
    codes = torch.arange(256, dtype=torch.uint8)
    weight = torch.zeros(256, 128, dtype=torch.uint8)
    weight[:, 5] = codes.masked_fill(codes & 127 == 127, 0)
    x = torch.zeros(tokens, 128, dtype=torch.bfloat16)
    x[:, 5] = 2.0 ** torch.arange(tokens)
    scale = torch.tensor([[1.0], [2.0**-20]])
    args = (x, weight.view(torch.float8_e4m3fn), scale)
    given = tuple(a.to(DEVICE) for a in args)
    found = IMPLEMENTATIONS["block_linear", "cuda"](*given).cpu()
    assert torch.equal(found, SPECIFICATIONS["block_linear"](*args))


@DTYPES
@pytest.mark.parametrize(("tokens", "limit"), [(1, None), (4, 0.4), (17, None), (17, 0.4)])
@pytest.mark.parametrize(("inner", "hidden"), [(128, 512), (40, 200), (160, 256)])
def test_fp8_experts_agree(
    inner: int, hidden: int, tokens: int, limit: float | None, dtype: torch.dtype
) -> None:
    of = Sizes(1, tokens, tokens, dtype)
    check("block_experts", expert_arguments("block_experts", of, 6, inner, hidden, 3, limit))


@DTYPES
@pytest.mark.parametrize("limit", [None, 0.4])
@pytest.mark.parametrize(
    ("tokens", "inner", "shared"),
    [(3, 128, 1), (8, 256, 2), (5, 40, 1), (20, 40, 2), (20, 128, 2), (12, 40, 1), (40, 128, 1)],
)
def test_shared_fp8_experts_agree(
    tokens: int, inner: int, shared: int, limit: float | None, dtype: torch.dtype
) -> None:
    """In the same launches, or behind where there are many tokens or parts would cut a block."""
    of = Sizes(1, tokens, tokens, dtype)
    args = expert_arguments("block_experts", of, 6, inner, 256, 3, limit)
    check("block_experts", (*args, *shared_blocks(4, shared * inner, 256)))


@DTYPES
def test_a_shared_expert_stands_in_front_of_small_tiles(dtype: torch.dtype) -> None:
    """Tiles of eight tokens: three of the shared expert's two parts each, the last not full."""
    args = expert_arguments("block_experts", Sizes(2, 9, 5, dtype), 16, 128, 256, 3, None)
    check("block_experts", (*args, *shared_blocks(4, 256, 256)))


@DTYPES
@pytest.mark.parametrize(("tokens", "limit"), [(1, None), (4, 0.4), (20, None), (60, 0.4)])
@pytest.mark.parametrize(("inner", "hidden"), [(128, 512), (32, 224)])
def test_mxfp4_experts_agree(
    inner: int, hidden: int, tokens: int, limit: float | None, dtype: torch.dtype
) -> None:
    """Tiles of 8, 16 and 32 tokens."""
    of = Sizes(1, tokens, tokens, dtype)
    check("mxfp4_experts", expert_arguments("mxfp4_experts", of, 6, inner, hidden, 3, limit))


@DTYPES
@pytest.mark.parametrize(("tokens", "shared"), [(3, 128), (20, 128), (5, 200)])
def test_mxfp4_experts_agree_beside_a_shared_one(
    tokens: int, shared: int, dtype: torch.dtype
) -> None:
    """As wide as the others, or of a width of its own."""
    of = Sizes(1, tokens, tokens, dtype)
    args = expert_arguments("mxfp4_experts", of, 6, 128, 256, 3, 0.4)
    check("mxfp4_experts", (*args, *shared_blocks(4, shared, 256)))


@DTYPES
@pytest.mark.parametrize("tokens", [12, 30, 90])
def test_fp8_experts_agree_when_many_tokens_choose_the_same(
    tokens: int, dtype: torch.dtype
) -> None:
    """Tiles of eight, sixteen and many tokens, several to an expert, some experts without any."""
    args = list(expert_arguments("block_experts", Sizes(1, tokens, 1, dtype), 4, 32, 128, 2, None))
    args[5] = torch.where(args[5] == 2, 0, args[5])
    check("block_experts", tuple(args))


@DTYPES
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [5, 12, 40, 130])
@pytest.mark.parametrize("name", ["block_experts", "mxfp4_experts"])
def test_a_choice_of_nobody_adds_nothing_and_reads_nothing(
    name: str, tokens: int, shared: bool, dtype: torch.dtype
) -> None:
    args = nobody_cases.arguments(name, tokens, dtype, shared)
    broken = nobody_cases.with_broken_first(name, args)
    given = tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in broken)
    found = IMPLEMENTATIONS[name, "cuda"](*given).cpu()
    expected = nobody_cases.expected(name, args)
    error = (found.double() - expected).abs().max().item()
    assert error <= BOUND[dtype] * max(1.0, expected.abs().max().item()), error


@DTYPES
def test_a_token_s_result_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    args = expert_arguments("block_experts", Sizes(1, 8, 3, dtype), 6, 64, 256, 2, None)
    given = [a.to(DEVICE) if isinstance(a, Tensor) else a for a in args]
    body, linear = IMPLEMENTATIONS["block_experts", "cuda"], IMPLEMENTATIONS["block_linear", "cuda"]
    weight = [a.to(DEVICE) for a in block_scaled(1, 48, 256)]
    together, joint = body(*given), linear(given[0], *weight)
    for token in range(8):
        alone = [a[:, token : token + 1] if n in (0, 5, 6) else a for n, a in enumerate(given)]
        assert torch.equal(body(*alone)[:, 0], together[:, token])
        assert torch.equal(linear(alone[0], *weight)[:, 0], joint[:, token])


@pytest.mark.parametrize("pairs", [8, 512, 520, 1024, 100_000])
def test_what_experts_give_is_rounded_for_many_tokens_and_never_in_one_order(pairs: int) -> None:
    module: Any = importlib.import_module("freewheel.ops.cuda.quantised_experts")
    assert module.shape_for(pairs, 8, 256, True, True).wide
    assert module.shape_for(pairs, 8, 256, True, False).wide == (pairs // 8 <= module.MOST_WIDE)
