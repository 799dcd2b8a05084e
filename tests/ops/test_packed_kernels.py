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
from freewheel.ops.rows import write_latents
from tests.ops.cases import Sizes, draw, draw_pages, draw_slots
from tests.ops.kernel_device import DEVICE, HAS_GPU, needs_kernels
from tests.ops.near_codes import moves
from tests.ops.packed_cases import (
    LATENT_BYTES,
    PACKED_CASES,
    RANK,
    ROPE,
    STORES,
    empty,
    filled,
    numbers,
    poisoned,
    spread,
)

pytestmark = needs_kernels
EXACT = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
"""Of the largest expected value, or of 1 if that is larger."""

MATRIX_OPS = (
    "fp8_sparse_mla",
    "fp8_index_logits",
    "fp8_window_attention",
    "fp8_place_queries",
)


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


def check(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    if not HAS_GPU and dtype == torch.bfloat16 and name in MATRIX_OPS:
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices")
    given = on_device(tuple(a.clone() if isinstance(a, Tensor) else a for a in args))
    found, expected = IMPLEMENTATIONS[name, "cuda"](*given), SPECIFICATIONS[name](*args)
    if name in STORES:
        assert moves(given[0].cpu()[1:], args[0][1:]) is None  # scratch page 0 may hold anything
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
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("heads", "lanes"), [(1, 33), (17, 150), (40, 300), (128, 70)])
def test_any_number_of_heads_agrees(
    heads: int, lanes: int, fixed: bool, dtype: torch.dtype
) -> None:
    pages = draw_pages(5, batch=2, width=2, columns=100, size=4)
    slots = draw_slots(5, pages, lanes, 2)
    slots[0, 0, 10:] = -1
    slots[0, 1, ::3] = -1
    slots[1, 1] = -1  # a query without a key
    latent = filled("latents", 5, pages.count)
    latent = poisoned(latent, slots[slots >= 0].unique().long())
    query = draw(6, 2, 2, heads, RANK + ROPE).to(dtype)
    check("fp8_sparse_mla", (query, latent, slots, 0.02, RANK, fixed), dtype)


@pytest.mark.parametrize("heads", [5, 40])
def test_both_parts_of_a_key_have_their_share_of_the_scores(heads: int) -> None:
    """By the norm of the error: with ordinary rows, a lost rotated part is within the bound."""
    dtype, limit = (torch.bfloat16, 2**-7) if HAS_GPU else (torch.float32, 1e-5)
    slots = torch.arange(40, 140, dtype=torch.int32).view(1, 1, 100)
    cache, rows = empty(40, LATENT_BYTES), draw(9, 1, 160, RANK + ROPE)
    rows[..., RANK:] *= 4
    write_latents(cache, rows, torch.arange(160)[None], ROPE)
    query = draw(8, 1, 1, heads, RANK + ROPE).to(dtype)
    given = (query, cache, slots, 0.02, RANK)
    found = IMPLEMENTATIONS["fp8_sparse_mla", "cuda"](*on_device(given)).cpu().double()
    expected = SPECIFICATIONS["fp8_sparse_mla"](query.double(), *given[1:])
    assert (found - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("heads", [5, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_with_fixed_runs_a_query_s_bits_are_the_same_in_any_company(
    packed: bool, heads: int
) -> None:
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    pages = draw_pages(7, batch=2, width=2, columns=100, size=4)
    slots = draw_slots(7, pages, 150, 2)
    latent = filled("latents", 7, pages.count)
    if not packed:
        latent = numbers(latent).to(dtype).view(pages.count, -1, RANK + ROPE)
    query = draw(8, 2, 2, heads, RANK + ROPE).to(dtype)
    name = "fp8_sparse_mla" if packed else "sparse_mla"
    given = on_device((query, latent, slots, 0.02, RANK, True))
    found = IMPLEMENTATIONS[name, "cuda"](*given)
    for row in range(2):
        own = (given[0][row : row + 1], latent.to(DEVICE), given[2][row : row + 1], *given[3:])
        assert torch.equal(IMPLEMENTATIONS[name, "cuda"](*own)[0], found[row])


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
