# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts in CUDA C++, compiled for this machine's processor, against the specification."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import Sizes
from tests.ops.quantised_cases import expert_arguments, shared_blocks
from tests.ops.test_cuda_sources import COMPILER, Call, built, compile_for_hopper, places

pytest.importorskip("triton")
module: Any = importlib.import_module("freewheel.ops.cuda.packed_experts")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ENTRY = """
extern "C" void run(const void* x, const unsigned char* codes, const unsigned char* scales,
                    const unsigned char* shared_codes, const float* shared_scales,
                    const int* experts, const int* lanes, const float* shares, void* out,
                    int blocks, int bytes, float limit, int count) {
  run_blocks(blocks, 1, THREADS, bytes, [=] {
    packed_experts((const unsigned short*)x, codes, scales, shared_codes, shared_scales, experts,
                   lanes, shares, out, limit, count);
  });
}
"""
HIDDEN, WIDTH, EXPERTS, TOP_K = 1024, 128, 3, 2


TILES = {
    True: (module.Tile(2, 1, 2, 2, 12), module.Tile(4, 1, 1, 4, 16)),
    False: (module.Tile(4, 2, 4, 4, 4), module.Tile(2, 2, 1, 2, 16)),
}
"""Of both projections, by whether tokens are few."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], Call]:
    """By (few, down): the kernel for HIDDEN and WIDTH."""
    return {
        (few, down): compiled(tmp_path_factory.mktemp("built"), few, down)
        for few in (True, False)
        for down in (0, 1)
    }


def compiled(folder: Path, few: bool, down: int) -> Call:
    sizes = {"TOP_K": TOP_K, "HIDDEN": HIDDEN, "WIDTH": WIDTH, "FEW": int(few), "EXTRA": 1}
    constants = sizes | TILES[few][down].constants() | {"DOWN": down, "CLAMP": 1 - down}
    return built(folder, "packed_experts", ENTRY, constants)


def listed(ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(experts, lanes) of the tiles of `ids`, and one tile of nothing behind them."""
    experts, lanes = [], []
    for expert in range(EXPERTS):
        own = (ids.flatten() == expert).nonzero().flatten().tolist()
        for at in range(0, len(own), tokens):
            experts.append(expert)
            lanes += (own[at : at + tokens] + [-1] * tokens)[:tokens]
    return torch.tensor([*experts, -1]).int(), torch.tensor(lanes + [-1] * tokens).int()


def found(source: Any, args: tuple[Any, ...], few: bool) -> Tensor:
    """What the kernel makes of the arguments of `mxfp4_experts`, whose limit is not None."""
    x, *own, ids, weights, limit, up_codes, up_scale, low_codes, low_scale = args
    x, ids, shares, pairs = x.flatten(0, -2), ids.reshape(-1, TOP_K), weights.float(), ids.numel()
    up, low = TILES[few]
    where = (ids, ids) if few else listed(ids, 8 * up.columns)
    tiles = -(-len(x) // (8 * up.columns)) + (pairs if few else len(where[0]))
    rows = pairs + len(x)
    inner = torch.full((rows, WIDTH), torch.nan, dtype=torch.bfloat16)
    parts = torch.full((rows, HIDDEN), torch.nan)
    first = tiles * WIDTH // (8 * up.tiles), up.shared
    given = places(x, *own[:2], up_codes, up_scale, *where, shares, inner)
    source[few, 0](*given, *first, ctypes.c_float(limit), pairs)
    second = tiles * HIDDEN // (16 * low.tiles), low.shared
    given = places(inner, *own[2:], low_codes, low_scale, *where, shares, parts)
    source[few, 1](*given, *second, ctypes.c_float(0), pairs)
    nobody = (ids < 0).flatten()
    assert parts[:pairs][nobody].isnan().all() and inner[:pairs][nobody].isnan().all()
    parts[:pairs][nobody] = 0
    return parts[:pairs].view(-1, TOP_K, HIDDEN).sum(1) + parts[pairs:]


def arguments(tokens: int, seed: int = 1) -> list[Any]:
    of = Sizes(1, tokens, seed, torch.bfloat16)
    args = expert_arguments("mxfp4_experts", of, EXPERTS, WIDTH, HIDDEN, TOP_K, 0.4)
    return [*args, *shared_blocks(7, WIDTH, HIDDEN)]


def check(source: Any, args: tuple[Any, ...], few: bool) -> None:
    expected = SPECIFICATIONS["mxfp4_experts"](args[0].double(), *args[1:]).view(-1, HIDDEN)
    off = (found(source, args, few).double() - expected).norm()
    assert off <= 2**-8 * expected.norm()  # of bfloat16 between the two projections


@pytest.mark.parametrize(("tokens", "few"), [(5, True), (28, False)])
def test_the_source_agrees(source: Any, tokens: int, few: bool) -> None:
    check(source, tuple(arguments(tokens)), few)


def test_pairs_of_one_expert_are_computed_eight_at_a_time(source: Any) -> None:
    args = arguments(7)
    args[5][:, :5] = 0
    check(source, tuple(args), True)


@pytest.mark.parametrize(("tokens", "few"), [(7, True), (28, False)])
def test_choices_of_nobody_are_left_out(source: Any, tokens: int, few: bool) -> None:
    """As where experts are dealt out, and others hold those that most tokens chose."""
    args = arguments(tokens)
    args[5] = args[5].masked_fill(args[5] > 1, -1)
    args[5][:, -1] = -1
    check(source, tuple(args), few)


def test_a_token_s_bits_are_the_same_alone_and_in_company(source: Any) -> None:
    """By one tile, which is what `fixed` asks for."""
    args = arguments(28)
    together = found(source, tuple(args), False)
    for token in (0, 13, 27):
        alone = [a[:, token : token + 1] if i in (0, 5, 6) else a for i, a in enumerate(args)]
        assert torch.equal(found(source, tuple(alone), False)[0], together[token])


def test_scales_far_from_one_keep_the_weights_exact(source: Any) -> None:
    """Beyond what one multiplication takes, on either side, in groups beside ordinary ones."""
    args = arguments(2)
    up, low = args[2], args[4]
    up[:, :, 3] = 26  # of no weight beside the others
    up[:, :WIDTH, 5] = 127 + 60
    args[0][..., 160:192] *= 2.0**-64
    low[1, :, 2] = 200
    check(source, tuple(args), True)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_it_compiles_for_hopper(few: bool, columns: int) -> None:
    sizes = {"TOP_K": 6, "HIDDEN": 4096, "WIDTH": 256, "FEW": int(few and columns == 1), "EXTRA": 1}
    for down, tile in enumerate(module.tiles_for(4096, 256, columns, few)):
        constants = sizes | tile.constants() | {"DOWN": down, "CLAMP": 1 - down}
        compile_for_hopper("packed_experts", constants)
