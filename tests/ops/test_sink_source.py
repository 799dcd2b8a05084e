# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks in CUDA C++, part by part, compiled for this machine's processor."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import draw
from tests.ops.test_cuda_sources import COMPILER, Call, built, compile_for_hopper, places

pytest.importorskip("triton")
module: Any = importlib.import_module("freewheel.ops.cuda.sinks")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ENTRY = """
extern "C" void run(const void* query, const void* keys, const int* slots, const void* entries,
                    const int* entry_slots, float* part_out, float* high_out, float* total_out,
                    float scale, int blocks, int bytes, int width, int others, int key_parts,
                    int parts, int heads) {
  run_blocks(blocks, 1, 128, bytes, [=] {
    attend_parts((const unsigned short*)query, (const unsigned short*)keys, slots,
                 (const unsigned short*)entries, entry_slots, part_out, high_out, total_out, scale,
                 width, others, key_parts, parts, heads);
  });
}
"""
DIM, QUERIES, WIDTH, OTHERS, PARTS, KEY_PARTS = 256, 3, 70, 90, 4, 2
SCALE = 0.1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Call:
    return built(tmp_path_factory.mktemp("built"), "attend_parts", ENTRY, {"DIM": DIM})


def lists(seed: int, count: int, rows: int) -> Tensor:
    """Slots int32 [QUERIES, count], each at most once in a query, some lanes empty."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.stack(
        [torch.randperm(rows, generator=generator)[:count] for _ in range(QUERIES)]
    )
    empty = torch.rand(QUERIES, count, generator=generator) < 0.3
    return picked.masked_fill(empty, -1).int()


def part(query: Tensor, cache: Tensor, lanes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mixed [H, D], high [H], total [H]) of the lanes that are there, in float64."""
    keys = cache[lanes[lanes >= 0].long()].double()
    scores = query.double() @ keys.T * SCALE
    high = scores.max(-1).values
    weights = (scores - high[:, None]).exp()
    return weights @ keys, high, weights.sum(-1)


@pytest.mark.parametrize("heads", [8, 3])
def test_every_part_is_what_its_lanes_say(run: Call, heads: int) -> None:
    query = draw(1, QUERIES, heads, DIM).bfloat16()
    keys, entries = draw(2, 200, DIM).bfloat16(), draw(3, 120, DIM).bfloat16()
    slots, picks = lists(4, WIDTH, 100), lists(5, OTHERS, 120)
    picks[1, module.PART :] = -1  # a part of nothing
    keys[100:] = torch.nan  # nobody's
    out = torch.full((QUERIES, PARTS, heads, DIM), torch.nan)
    high, total = (torch.full((QUERIES, PARTS, heads), torch.nan) for _ in range(2))
    given = places(query, keys, slots, entries, picks, out, high, total)
    sizes = (WIDTH, OTHERS, KEY_PARTS, PARTS, heads)
    run(*given, ctypes.c_float(SCALE), QUERIES * PARTS, module.shared_bytes(DIM), *sizes)
    for n in range(QUERIES):
        for at in range(PARTS):
            cache, own, nth = (keys, slots, at) if at < KEY_PARTS else (entries, picks, at - 2)
            lanes = own[n, nth * module.PART : (nth + 1) * module.PART]
            if not bool((lanes >= 0).any()):
                assert bool((high[n, at] == -torch.inf).all() and (total[n, at] == 0).all())
                continue
            mixed, highest, sums = part(query[n], cache, lanes)
            torch.testing.assert_close(high[n, at].double(), highest, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(total[n, at].double(), sums, rtol=1e-5, atol=1e-5)
            off = (out[n, at].double() - mixed).norm()
            assert off <= 2**-8 * mixed.norm()  # weights are rounded to bfloat16


def test_it_compiles_for_hopper() -> None:
    compile_for_hopper("attend_parts", {"DIM": 512})
