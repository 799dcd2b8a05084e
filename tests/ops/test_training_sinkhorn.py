# SPDX-License-Identifier: Apache-2.0
"""The trainer's Sinkhorn operator has the values and the gradient of the steps written out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TRAIN = Path(__file__).parents[2] / "train"


@pytest.fixture
def sinkhorn(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TRAIN))
    return importlib.import_module("sinkhorn")


def written_out(mix: Tensor, eps: float, iterations: int) -> Tensor:
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("shape", [(7, 4, 4), (2, 5, 3, 3)])
def test_the_gradient_had_back_from_the_sums_is_that_of_the_steps(
    sinkhorn: Any, shape: tuple[int, ...], iterations: int
) -> None:
    chance = torch.Generator().manual_seed(iterations)
    mix = torch.rand(shape, generator=chance, dtype=torch.float64) + 1e-6
    mix[0] = mix[0] * 0.02 + 50 * torch.eye(shape[-1])  # as streams begin: nearly apart
    weight = torch.randn(shape, generator=chance, dtype=torch.float64)
    one, two = mix.clone().requires_grad_(), mix.clone().requires_grad_()
    want, got = written_out(one, 1e-6, iterations), sinkhorn.balanced(two, 1e-6, iterations)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (want * weight).sum().backward()
    (got * weight).sum().backward()
    torch.testing.assert_close(two.grad, one.grad, rtol=1e-9, atol=1e-12)
