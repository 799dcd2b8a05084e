# SPDX-License-Identifier: Apache-2.0
"""Routes of tokens by a block each, compiled for this machine's processor, as specified."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import draw
from tests.ops.test_cuda_sources import COMPILER, built, compile_for_hopper, places

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ENTRY = """
extern "C" void run(const float* parts, const float* bias, float* weights, int* ids, int count,
                    float scale) {
  run_blocks(count, 1, THREADS, 8 * THREADS + 128,
             [=] { route_tokens(parts, bias, weights, ids, scale, count); });
}
"""
TOKENS, TOP_K = 7, 6


def routed(
    folder: Path, parts: Tensor, bias: Tensor, groups: tuple[int, int], scale: float, root: int
) -> tuple[Tensor, Tensor]:
    count, _, experts = parts.shape
    constants = {"EXPERTS": experts, "THREADS": -(-experts // 32) * 32, "PARTS": count}
    constants |= {"GROUPS": groups[0], "TOP_GROUPS": groups[1], "TOP_K": TOP_K, "NORMALISE": 1}
    run = built(folder, "route_tokens", ENTRY, constants | {"SOFTPLUS": root})
    weights, ids = torch.full((TOKENS, TOP_K), -7.0), torch.full((TOKENS, TOP_K), -7).int()
    run(*places(parts, bias, weights, ids), TOKENS, ctypes.c_float(scale))
    return weights, ids


@pytest.mark.parametrize(
    ("experts", "groups", "parts"), [(256, (8, 4), 1), (40, (4, 2), 3), (100, (1, 1), 2)]
)
@pytest.mark.parametrize("kind", ["random", "ties", "wrong"])
def test_experts_are_those_of_the_sum_of_parts(
    tmp_path: Path, experts: int, groups: tuple[int, int], parts: int, kind: str
) -> None:
    """Of equals the lowest; where logits are no numbers, ids are still those of experts."""
    own, bias, right = draw(1, parts, TOKENS, experts), draw(2, experts) / 4, torch.arange(TOKENS)
    if kind == "ties":
        own, bias = (own * 2).round() / 2, torch.zeros(experts)
    if kind == "wrong":
        own[0, 3, ::3], right = torch.nan, right[right != 3]
    weights, ids = routed(tmp_path, own, bias, groups, 2.5, 0)
    expected = SPECIFICATIONS["route"](own.sum(0), bias, *groups, TOP_K, True, 2.5)
    assert int(ids.min()) >= 0 and int(ids.max()) < experts
    assert torch.equal(ids[right], expected[1][right])
    torch.testing.assert_close(weights[right], expected[0][right], rtol=1e-5, atol=1e-6)


def test_experts_are_those_of_the_highest_roots(tmp_path: Path) -> None:
    own, bias = draw(1, 2, TOKENS, 256) * 4, draw(2, 256) / 4
    weights, ids = routed(tmp_path, own, bias, (1, 1), 1.5, 1)
    expected = SPECIFICATIONS["route_best"](own.sum(0), bias, TOP_K, 1.5)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", [1, 28])
def test_it_compiles_for_hopper(parts: int) -> None:
    constants = {"EXPERTS": 256, "THREADS": 256, "PARTS": parts, "GROUPS": 8, "TOP_GROUPS": 4}
    constants |= {"TOP_K": 8, "NORMALISE": 1, "SOFTPLUS": 0}
    compile_for_hopper("route_tokens", constants)
