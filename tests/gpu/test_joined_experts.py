# SPDX-License-Identifier: Apache-2.0
"""FP8 experts in one launch against the specification, at the sizes that they are for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from freewheel.ops.codecs import quantise_blocks

EXPERTS, WIDTH, TOP_K = 40, 256, 8


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    load_kernels("cuda")
    module: Any = importlib.import_module("freewheel.ops.cuda.native")
    if module.lacking() is not None:
        pytest.skip(f"nothing in CUDA C++ runs here: {module.lacking()}")
    yield


def blocks(*shape: int) -> tuple[Tensor, Tensor]:
    values, scale = quantise_blocks(torch.randn(shape, device="cuda") / shape[-1] ** 0.5)
    return values, scale * (torch.rand_like(scale) + 0.5)


def weights(count: int, hidden: int) -> tuple[Tensor, ...]:
    """Gates and ups, outputs, and their scales; one expert has no dimension of experts."""
    lead = () if count == 1 else (count,)
    return *blocks(*lead, 2 * WIDTH, hidden), *blocks(*lead, hidden, WIDTH)


def case(tokens: int, hidden: int, kind: str) -> tuple[Any, ...]:
    torch.manual_seed(tokens)
    ids = torch.rand(1, tokens, EXPERTS, device="cuda").argsort(-1)[..., :TOP_K].int()
    if kind == "same":
        ids = ids[:, :1].expand(-1, tokens, -1).contiguous()
    if kind == "nobody":
        ids = ids.masked_fill(torch.rand(ids.shape, device="cuda") < 0.6, -1)
    if kind == "twice":
        ids[..., 3] = ids[..., 0]
    x = torch.randn(1, tokens, hidden, device="cuda").bfloat16()
    shares = torch.rand(1, tokens, TOP_K, device="cuda")
    return x, *weights(EXPERTS, hidden), ids, shares, None, *weights(1, hidden)


@pytest.mark.parametrize(
    ("tokens", "hidden"), [(1, 7168), (2, 4096), (3, 7168), (4, 6144), (4, 7168)]
)
@pytest.mark.parametrize("kind", ["random", "same", "nobody", "twice"])
def test_experts_in_one_launch_stay_within_their_error(tokens: int, hidden: int, kind: str) -> None:
    """And give the same bits each time, from memory that was not a number before."""
    args = case(tokens, hidden, kind)
    expected = SPECIFICATIONS["block_experts"](args[0].double(), *args[1:])
    run = IMPLEMENTATIONS["block_experts", "cuda"]
    torch.full((1 << 24,), torch.nan, device="cuda")
    found = run(*args)
    off = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    assert off.max() <= 2**-8
    assert all(torch.equal(run(*args), found) for _ in range(20))


def test_a_token_s_bits_are_the_same_alone_and_in_company() -> None:
    args, run = case(4, 7168, "random"), IMPLEMENTATIONS["block_experts", "cuda"]
    together = run(*args)
    for token in range(4):
        place = slice(token, token + 1)
        alone = [a[:, place].contiguous() if i in (0, 5, 6) else a for i, a in enumerate(args)]
        assert torch.equal(run(*alone), together[:, place])


def test_tokens_that_begin_anywhere_are_multiplied_all_the_same() -> None:
    args = case(4, 7168, "random")
    moved = torch.empty(args[0].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]
    moved = moved.view(args[0].shape).copy_(args[0])
    assert moved.data_ptr() % 16
    expected = SPECIFICATIONS["block_experts"](args[0].double(), *args[1:])
    found = IMPLEMENTATIONS["block_experts", "cuda"](moved, *args[1:])
    assert (found.double() - expected).norm() <= 2**-8 * expected.norm()
