# SPDX-License-Identifier: Apache-2.0
"""Lists of tiles by one block, compiled for this machine's processor, against plain Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ops.test_cuda_sources import COMPILER, built, compile_for_hopper, places

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ENTRY = """
extern "C" void run(const int* ids, int* experts, int* lanes, int pairs, int most) {
  run_blocks(1, 1, THREADS, 36 * EXPERTS + 32,
             [=] { list_tiles(ids, experts, lanes, pairs, most); });
}
"""
EXPERTS = 36


def listed(ids: Tensor, tokens: int, most: int) -> tuple[Tensor, Tensor]:
    """(experts, lanes) as the kernel's comment says."""
    experts, lanes = [-1] * most, [-1] * most * tokens
    tile = 0
    for expert in range(EXPERTS):
        own = (ids == expert).nonzero().flatten().tolist()
        for at in range(0, len(own), tokens):
            experts[tile] = expert
            for place, pair in enumerate(own[at : at + tokens]):
                lanes[tile * tokens + place] = pair
            tile += 1
    return torch.tensor(experts).int(), torch.tensor(lanes).int()


@pytest.mark.parametrize(("pairs", "rounds"), [(1, 1), (500, 1), (1000, 2)])
@pytest.mark.parametrize("kind", ["even", "one", "nobody"])
def test_tiles_are_listed_in_order(tmp_path: Path, pairs: int, rounds: int, kind: str) -> None:
    run = built(tmp_path, "list_tiles", ENTRY, {"EXPERTS": EXPERTS, "ROUNDS": rounds, "TOKENS": 8})
    ids = torch.randint(0, EXPERTS, (pairs,), generator=torch.Generator().manual_seed(1)).int()
    if kind == "one":
        ids[pairs // 3 :] = 7
    if kind == "nobody":
        ids[ids % 3 == 0] = -1
    most = min(EXPERTS, pairs) + pairs // 8
    experts, lanes = torch.full((most,), 99).int(), torch.full((most * 8,), 99).int()
    run(*places(ids, experts, lanes), pairs, most)
    expected = listed(ids, 8, most)
    assert torch.equal(experts, expected[0]) and torch.equal(lanes, expected[1])


@pytest.mark.parametrize("rounds", [1, 4])
def test_it_compiles_for_hopper(rounds: int) -> None:
    compile_for_hopper("list_tiles", {"EXPERTS": 256, "ROUNDS": rounds, "TOKENS": 16})
