# SPDX-License-Identifier: Apache-2.0
"""Runs joined and their values projected, compiled for this machine's processor, as specified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import draw
from tests.ops.test_cuda_sources import COMPILER, built, compile_for_hopper, places

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ENTRY = """
extern "C" void run(const float* mixed, const float* high, const float* total,
                    const unsigned short* weight, unsigned short* out, int count) {
  run_blocks((count + TOKENS - 1) / TOKENS * HEADS * CLUSTER, CLUSTER, THREADS, sizeof(Space),
             [=] { join_values(mixed, high, total, weight, out, count); });
}
"""
HEADS, RANK, VALUE = 2, 512, 128
SIZES = {"RANK": RANK, "VALUE": VALUE, "HEADS": HEADS}


@pytest.mark.parametrize(("parts", "count", "tokens"), [(5, 3, 8), (32, 4, 8), (2, 19, 16)])
def test_runs_are_joined_and_projected(tmp_path: Path, parts: int, count: int, tokens: int) -> None:
    """A run whose sum is 0 may hold anything, and a query of such runs alone gives zeros."""
    run = built(tmp_path, "join_values", ENTRY, SIZES | {"PARTS": parts, "TOKENS": tokens})
    mixed = draw(1, count, parts, HEADS, RANK)
    high, total = draw(2, *mixed.shape[:3]), draw(3, *mixed.shape[:3]).abs() + 0.1
    mixed[0, 1], high[0, 1], total[0, 1] = torch.nan, torch.nan, 0
    mixed[1, :, 0], total[1, :, 0] = torch.nan, 0
    weight = (draw(4, HEADS, RANK, VALUE) / RANK**0.5).bfloat16()
    out = torch.full((count, HEADS * VALUE), torch.nan, dtype=torch.bfloat16)
    run(*places(mixed, high, total, weight, out), count)
    full = total > 0
    highest = high.masked_fill(~full, -torch.inf).amax(1, keepdim=True)
    factor = torch.where(full, (high - highest).exp(), 0.0)
    sums = torch.where(full[..., None], mixed * factor[..., None], 0.0).sum(1)
    whole = torch.where(full, total * factor, 0.0).sum(1)[..., None]
    joined = torch.where(whole == 0, 0.0, sums / whole).bfloat16()
    expected = SPECIFICATIONS["expand_values"](joined[None], weight)[0]
    assert not out[1, :VALUE].any()
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(("parts", "tokens"), [(32, 8), (8, 16)])
def test_it_compiles_for_hopper(parts: int, tokens: int) -> None:
    constants = {"RANK": RANK, "VALUE": VALUE, "HEADS": 16, "PARTS": parts, "TOKENS": tokens}
    compile_for_hopper("join_values", constants)
