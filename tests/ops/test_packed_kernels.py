# SPDX-License-Identifier: Apache-2.0
"""The Triton bodies over packed rows against the specifications: on a GPU, or interpreted.

TRITON_INTERPRET=1 python -m pytest tests/ops/test_packed_kernels.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from tests.ops.cases import Sizes, draw, draw_pages, draw_slots
from tests.ops.kernel_device import DEVICE, HAS_GPU, needs_kernels
from tests.ops.packed_cases import (
    PACKED_CASES,
    RANK,
    ROPE,
    STORES,
    filled,
    numbers,
    poisoned,
    spread,
)

pytestmark = needs_kernels
EXACT = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
"""Of the largest expected value, or of 1 if that is larger."""

MATRIX_OPS = ("fp8_sparse_mla", "fp8_index_logits", "fp8_window_attention")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    load_kernels("cuda")
    yield


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args)


def listed(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    wanted, found = expected.double(), actual.cpu().double()
    assert torch.equal(found.isfinite(), wanted.isfinite())
    found, wanted = found[wanted.isfinite()], wanted[wanted.isfinite()]
    if wanted.numel():
        limit = EXACT[dtype] * max(1.0, wanted.abs().max().item())
        assert (found - wanted).abs().max().item() <= limit


def assert_same_rows(actual: Tensor, expected: Tensor) -> None:
    """All but a few FP8 numbers equal, and those off by one rounding: sums have another order.

    Of bfloat16 the last bit may differ (the interpreter cuts it off). Scratch page 0 may hold
    anything.
    """
    found, wanted = (numbers(cache.cpu()[1:]) for cache in (actual, expected))
    assert torch.equal(found.isnan(), wanted.isnan())
    known = ~wanted.isnan()
    found, wanted = found[known], wanted[known]
    if not len(wanted):
        return
    off = (found - wanted).abs() > 2**-6 * wanted.abs() + 1e-30
    assert off.double().mean() <= 0.01
    assert ((found - wanted).abs() <= 2**-3 * wanted.abs() + 2**-8 * wanted.abs().max()).all()


def check(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    if not HAS_GPU and dtype == torch.bfloat16 and name in MATRIX_OPS:
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices")
    given = on_device(tuple(a.clone() if isinstance(a, Tensor) else a for a in args))
    found, expected = IMPLEMENTATIONS[name, "cuda"](*given), SPECIFICATIONS[name](*args)
    if name in STORES:
        assert_same_rows(given[0], args[0])
    for one, other in zip(listed(found), listed(expected), strict=True):
        assert_near(one, other, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(PACKED_CASES))
def test_a_kernel_agrees_with_its_specification(name: str, seed: int, dtype: torch.dtype) -> None:
    batch, width = [(1, 1), (2, 3), (3, 5)][seed]
    check(name, PACKED_CASES[name](name, Sizes(batch, width, seed, dtype)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_of_many_parts_and_heads_agree_and_what_none_names_is_not_read(
    dtype: torch.dtype,
) -> None:
    pages = draw_pages(3, batch=2, width=2, columns=60, size=4)
    slots = draw_slots(3, pages, 180, 2)
    slots[1, 1, 128:] = -1  # a part without a lane
    slots[0, 1] = -1  # a query without a key
    latent = filled("latents", 3, pages.count)
    latent = poisoned(latent, slots[slots >= 0].unique().long())
    query = draw(4, 2, 2, 20, RANK + ROPE).to(dtype)
    check("fp8_sparse_mla", (query, latent, slots, 0.02, RANK), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_a_row_is_nan_in_what_reads_it(dtype: torch.dtype) -> None:
    name = "fp8_norm_latents"
    args = PACKED_CASES[name](name, Sizes(1, 2, 0, dtype))
    args[3][0, 1, 5] = float("nan")
    check(name, args, dtype)
    query, slots = draw(4, 1, 1, 2, RANK + ROPE).to(dtype), args[-1][:, 1:].int()[..., None]
    check("fp8_sparse_mla", (query, args[0], slots, 0.02, RANK), dtype)


def test_codes_are_the_nearest_ones_with_ties_to_even() -> None:
    name = "fp8_norm_latents"
    args = PACKED_CASES[name](name, Sizes(4, 9, 1, torch.float32))
    every = torch.arange(-448, 449).repeat(42)[: 4 * 9 * 512].view(4, 9, 512).float() / 2.0
    args[3][..., :512] = spread(every)
    check(name, args, torch.float32)
