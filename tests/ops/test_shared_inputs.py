# SPDX-License-Identifier: Apache-2.0
"""Projections whose inputs several programs share, and those of many tokens, one kernel at a time.

On a GPU, or without one: TRITON_INTERPRET=1 python -m pytest tests/ops/test_shared_inputs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from tests.ops.cases import draw
from tests.ops.kernel_device import DEVICE, HAS_GPU, needs_kernels
from tests.ops.quantised_cases import block_scaled

pytestmark = needs_kernels
needs_hopper = pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper card"
)
DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]
BOUND = {torch.float32: 2e-5, torch.bfloat16: 2**-7}
"""Of the largest expected value."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    load_kernels("cuda")
    yield


def module(name: str) -> Any:
    return import_module(f"freewheel.ops.cuda.{name}")


def assert_close(found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    assert found.isfinite().all()
    error = (found.cpu().double() - expected).abs().max().item()
    assert error <= bound * expected.abs().max().item(), error


def projected(tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """(the arguments of a launch, on the device; what the specification gives in float64)."""
    x, (weight, scale) = draw(1, tokens, inputs).to(dtype), block_scaled(2, outputs, inputs)
    given = module("quantised").Given(
        x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), tokens, outputs, inputs, 128, 128
    )
    return given, SPECIFICATIONS["block_linear"](x.double(), weight, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize(
    ("launch", "tile", "tokens"),
    [
        ("few", (32, 2, 3), 3),
        ("products", (16, 64, 4, 3), 13),
        ("products", (32, 128, 8, 3), 70),
        ("many", (32, 32, 4, 2), 40),
    ],
)
def test_parts_of_a_sum_add_up(
    launch: str, tile: tuple[int, ...], tokens: int, parts: int, dtype: torch.dtype
) -> None:
    """However many programs share the inputs: 5 do not divide 9 steps."""
    quantised = module("quantised")
    given, expected = projected(tokens, 200, 1152, dtype)
    tiles = {
        "few": quantised.FewTile, "products": quantised.ProductTile, "many": quantised.ManyTile
    }  # fmt: skip
    out = torch.full((tokens, 200), float("nan"), dtype=dtype, device=DEVICE)
    found = quantised.launch(given, out, tiles[launch](*tile, parts))
    assert_close(found, expected, BOUND[dtype])


@needs_hopper
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "tile"), [(17, (32, 4, 4)), (70, (64, 4, 6)), (200, (128, 4, 4))]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(200, 1152), (264, 256), (128, 2560)])
def test_products_that_begin_early_agree(
    outputs: int, inputs: int, tokens: int, tile: tuple[int, ...], parts: int
) -> None:
    """Fewer blocks than buffers and more; outputs and tokens that are not there."""
    given, expected = projected(tokens, outputs, inputs, torch.bfloat16)
    out = torch.full((tokens, outputs), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    own = module("early_products").EarlyTile(*tile, parts)
    assert_close(module("quantised").launch(given, out, own), expected, BOUND[torch.bfloat16])


@needs_hopper
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "tile"), [(17, (32, 4, 4)), (70, (64, 3, 4)), (200, (128, 4, 5)), (40, (128, 3, 2))]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(200, 1152), (264, 256), (128, 2560)])
def test_products_fed_by_rings_agree(
    outputs: int, inputs: int, tokens: int, tile: tuple[int, ...], parts: int
) -> None:
    """Fewer steps than stages and more; outputs and tokens that are not there."""
    ring: Any = module("ring_products")
    given, expected = projected(tokens, outputs, inputs, torch.bfloat16)
    few = tokens <= ring.MOST_TOKENS
    assert ring.serves(given.x, given.weight, given.block_n, given.block_k) == few
    out = torch.full((tokens, outputs), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    found = module("quantised").launch(given, out, ring.RingTile(*tile, parts))
    assert_close(found, expected, BOUND[torch.bfloat16])


@needs_hopper
@pytest.mark.parametrize("tokens", [17, 32, 100])
def test_rows_that_no_copy_may_begin_at_are_multiplied_all_the_same(tokens: int) -> None:
    given, expected = projected(tokens, 200, 256, torch.bfloat16)
    moved = torch.empty(given.x.numel() + 1, dtype=torch.bfloat16, device=DEVICE)[1:]
    moved.copy_(given.x.view(-1))
    assert moved.data_ptr() % 16
    found = module("quantised").block_linear(moved.view(given.x.shape), given.weight, given.scale)
    assert_close(found, expected, BOUND[torch.bfloat16])


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize(
    ("outputs", "inputs", "tile"),
    [
        (200, 1152, (32, 4, 3, 4, 1, 9)),  # blocks that are not there
        (70, 1024, (32, 8, 1, 4, 1, 8)),
        (64, 2048, (32, 8, 2, 8, 1, 5)),
        (40, 1000, (32, 2, 1, 2, 4, 2)),  # inputs that are not there
        (33, 1280, (16, 2, 2, 2, 3, 4)),
    ],
)
def test_products_of_held_weights_agree(
    outputs: int, inputs: int, tile: tuple[int, ...], tokens: int
) -> None:
    dtype = DTYPES[-1]  # float32 on a card would spill: it is streamed
    quantised = module("quantised")
    given, expected = projected(tokens, outputs, inputs, dtype)
    out = torch.full((tokens, outputs), float("nan"), dtype=dtype, device=DEVICE)
    found = quantised.launch(given, out, module("held_products").HeldTile(*tile))
    assert_close(found, expected, BOUND[dtype])


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(2240, 7168), (11264, 1536), (7168, 2048), (2816, 6144), (40, 100)]
)
def test_held_weights_are_held_whole(outputs: int, inputs: int) -> None:
    """Every input has its program, whatever the weight's shape."""
    parts = module("early_products").early_tile(4, outputs, inputs).parts
    tile = module("held_products").held_tile(4, outputs, inputs, parts)
    assert tile is not None
    assert tile.parts * tile.blocks * tile.rounds * 128 >= inputs
    assert (tile.parts - 1) * tile.blocks * tile.rounds * 128 < inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [9, 40, 300])
def test_projections_of_many_inputs_agree(tokens: int, dtype: torch.dtype) -> None:
    """What the op itself chooses."""
    given, expected = projected(tokens, 136, 2048, dtype)
    body = IMPLEMENTATIONS["block_linear", "cuda"]
    assert_close(body(given.x, given.weight, given.scale), expected, BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slab", [1 << 25, 128 * 260])
def test_widened_weights_give_the_same_product(
    slab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, or a slab of rows at a time."""
    prompts = module("wide_prompts")
    monkeypatch.setattr(prompts, "SLAB", slab)
    given, expected = projected(40, 300, 260, dtype)
    out = torch.full((40, 300), float("nan"), dtype=dtype, device=DEVICE)
    found = prompts.multiply_widened(given.x, given.weight, given.scale, out, 128, 128)
    assert_close(found, expected, BOUND[dtype])


@pytest.mark.parametrize("tokens", [9, 16, 70, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(37, 1500), (64, 2048), (130, 128)])
def test_wide_products_round_no_weight(outputs: int, inputs: int, tokens: int) -> None:
    """Weights that bfloat16 halves, or even pairs of them, would not hold."""
    x = draw(1, tokens, inputs).bfloat16()
    weight = draw(2, outputs, inputs) * (1 + 2**-20) / inputs**0.5
    found = module("wide_products").wide_products(x.to(DEVICE), weight.to(DEVICE))
    assert_close(found, x.double() @ weight.double().T, 2e-6)


def test_wide_products_are_exact_where_sums_are() -> None:
    """One input alone: the product of the whole weight, to its last bit, and of its sign."""
    x = torch.zeros(20, 256, dtype=torch.bfloat16)
    x[:, 7] = 2.0 ** torch.arange(-10, 10)
    weight = draw(3, 64, 256)
    weight[:, 7] = torch.tensor([1 + 2**-23, -(2 - 2**-23), 1 / 3, -1e-30]).repeat(16)
    found = module("wide_products").wide_products(x.to(DEVICE), weight.to(DEVICE))
    assert torch.equal(found.cpu(), x.float() @ weight.T)
