# SPDX-License-Identifier: Apache-2.0
"""Repacked MXFP4 experts in CUDA C++, compiled for this machine's processor."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS, repack_mxfp4
from tests.ops.cases import Sizes
from tests.ops.quantised_cases import expert_arguments, shared_blocks
from tests.ops.test_cuda_sources import COMPILER, Call, built, compile_for_hopper, places

pytest.importorskip("triton")
module: Any = importlib.import_module("freewheel.ops.cuda.repacked_experts")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

STAYING = """
extern "C" void run(const void* x, const unsigned char* pieces, const unsigned char* shared_codes,
                    const float* shared_scales, const int* experts, const int* lanes,
                    const float* shares, void* out, int blocks, int bytes, float limit, int count,
                    int most) {
  run_blocks(blocks, 1, THREADS, bytes, [=] {
    repacked_experts((const unsigned short*)x, pieces, shared_codes, shared_scales, experts, lanes,
                     shares, out, limit, count, most, blocks);
  });
}
"""
TILED = """
extern "C" void run(const void* x, const unsigned char* pieces, const unsigned char* shared_codes,
                    const float* shared_scales, const int* experts, const int* lanes,
                    const float* shares, void* out, int blocks, int bytes, float limit, int count) {
  run_blocks(blocks, 1, THREADS, bytes, [=] {
    repacked_tiles((const unsigned short*)x, pieces, shared_codes, shared_scales, experts, lanes,
                   shares, out, limit, count);
  });
}
"""
HIDDEN, WIDTH, EXPERTS, TOP_K, BLOCKS = 1024, 384, 3, 2, 5


def rings() -> tuple[Any, Any]:
    """Four warps that share the inputs, a round in two; two that share three pieces each."""
    return module.Ring(4, 4, 3, 2, 1), module.Ring(2, 1, 4, 1, 2)


def shared_rings() -> tuple[Any, Any]:
    """Two groups of warps; slices of one piece behind."""
    return module.Ring(4, 2, 2, 3, 2), module.Ring(6, 3, 2, 2, 1)


KINDS = {
    "few": (module.Tile(2, 1, 2, 2, 12), module.Tile(4, 1, 1, 4, 16)),
    "listed": rings(),
    "listed in groups": shared_rings(),
    "tiles": (module.Tile(4, 2, 4, 4, 4), module.Tile(2, 2, 1, 2, 16)),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Call]:
    """By (kind, down): the kernel for HIDDEN and WIDTH."""
    found: dict[tuple[str, int], Call] = {}
    for kind, shapes in KINDS.items():
        for down, shape in enumerate(shapes):
            sizes = {"TOP_K": TOP_K, "HIDDEN": HIDDEN, "WIDTH": WIDTH, "EXTRA": 1}
            sizes |= shape.constants() | {"DOWN": down, "CLAMP": 1 - down}
            sizes |= {"FEW": int(kind == "few")}
            name, entry = "repacked_experts", STAYING
            if isinstance(shape, module.Tile):
                name, entry = "repacked_tiles", TILED
            found[kind, down] = built(tmp_path_factory.mktemp("built"), name, entry, sizes)
    return found


def listed(ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(experts, lanes) of the tiles of `ids`, and one tile of nothing behind them."""
    experts, lanes = [], []
    for expert in range(EXPERTS):
        own = (ids.flatten() == expert).nonzero().flatten().tolist()
        for at in range(0, len(own), tokens):
            experts.append(expert)
            lanes += (own[at : at + tokens] + [-1] * tokens)[:tokens]
    return torch.tensor([*experts, -1]).int(), torch.tensor(lanes + [-1] * tokens).int()


def found(source: Any, args: tuple[Any, ...], kind: str) -> Tensor:
    """What the kernel makes of the arguments of `mxfp4_experts`, whose limit is not None."""
    x, up, up_scale, low, low_scale, ids, weights, limit, *shared = args
    x, ids, shares, pairs = x.flatten(0, -2), ids.reshape(-1, TOP_K), weights.float(), ids.numel()
    own = repack_mxfp4(up, up_scale, True), repack_mxfp4(low, low_scale, False)
    columns = KINDS[kind][0].columns if kind == "tiles" else 1
    few = kind == "few"
    where = (ids, ids) if few else listed(ids, 8 * columns)
    entries = -(-len(x) // (8 * columns)) + (pairs if few else len(where[0]))
    rows = pairs + len(x)
    inner = torch.full((rows, WIDTH), torch.nan, dtype=torch.bfloat16)
    parts = torch.full((rows, HIDDEN), torch.nan)
    given = ((x, own[0], *shared[:2]), inner), ((inner, own[1], *shared[2:]), parts)
    for down, (inputs, out) in enumerate(given):
        shape = KINDS[kind][down]
        end = ctypes.c_float(0 if down else limit), pairs
        if isinstance(shape, module.Tile):
            across = out.shape[1] // ((16 if down else 8) * shape.tiles)
            blocks, size = entries * across, shape.shared
        else:
            blocks, size = BLOCKS, shape.shared(WIDTH if down else HIDDEN)
            end = *end, len(where[0])
        source[kind, down](*places(*inputs, *where, shares, out), blocks, size, *end)
    nobody = (ids < 0).flatten()
    assert parts[:pairs][nobody].isnan().all() and inner[:pairs][nobody].isnan().all()
    parts[:pairs][nobody] = 0
    return parts[:pairs].view(-1, TOP_K, HIDDEN).sum(1) + parts[pairs:]


def arguments(tokens: int, seed: int = 1) -> list[Any]:
    of = Sizes(1, tokens, seed, torch.bfloat16)
    args = expert_arguments("mxfp4_experts", of, EXPERTS, WIDTH, HIDDEN, TOP_K, 0.4)
    return [*args, *shared_blocks(7, WIDTH, HIDDEN)]


def check(source: Any, args: tuple[Any, ...], kind: str) -> None:
    expected = SPECIFICATIONS["mxfp4_experts"](args[0].double(), *args[1:]).view(-1, HIDDEN)
    off = (found(source, args, kind).double() - expected).norm()
    assert off <= 2**-8 * expected.norm()  # of bfloat16 between the two projections


def tokens_of(kind: str) -> int:
    return 6 if kind == "few" else 28


@pytest.mark.parametrize("kind", KINDS)
def test_the_source_agrees(source: Any, kind: str) -> None:
    check(source, tuple(arguments(tokens_of(kind))), kind)


def test_pairs_of_one_expert_are_computed_eight_at_a_time(source: Any) -> None:
    args = arguments(7)
    args[5][:, :5] = 0
    check(source, tuple(args), "few")


@pytest.mark.parametrize("kind", KINDS)
def test_choices_of_nobody_are_left_out(source: Any, kind: str) -> None:
    """As where experts are dealt out, and others hold those that most tokens chose."""
    args = arguments(tokens_of(kind))
    args[5] = args[5].masked_fill(args[5] > 1, -1)
    args[5][:, -1] = -1
    check(source, tuple(args), kind)


@pytest.mark.parametrize("kind", ["few", "listed"])
def test_where_nobody_chose_an_expert_only_the_shared_one_counts(source: Any, kind: str) -> None:
    args = arguments(5)
    args[5] = torch.full_like(args[5], -1)
    check(source, tuple(args), kind)


def test_a_token_s_bits_are_the_same_alone_and_in_company(source: Any) -> None:
    """By a list, which is what `fixed` asks for."""
    args = arguments(28)
    together = found(source, tuple(args), "listed")
    for token in (0, 13, 27):
        alone = [a[:, token : token + 1] if i in (0, 5, 6) else a for i, a in enumerate(args)]
        assert torch.equal(found(source, tuple(alone), "listed")[0], together[token])


@pytest.mark.parametrize("kind", ["few", "listed", "tiles"])
def test_scales_far_from_one_keep_the_weights_exact(source: Any, kind: str) -> None:
    """Beyond what one multiplication takes, on either side, in groups beside ordinary ones."""
    args = arguments(2)
    up, low = args[2], args[4]
    up[:, :, 3] = 26  # of no weight beside the others
    up[:, :WIDTH, 5] = 127 + 60
    args[0][..., 160:192] *= 2.0**-64
    low[1, :, 2] = 200
    check(source, tuple(args), kind)


@pytest.mark.parametrize(("hidden", "width"), [(4096, 256), (7168, 384), (1024, 2048)])
def test_blocks_that_stay_compile_for_hopper(hidden: int, width: int) -> None:
    sizes = {"TOP_K": 6, "HIDDEN": hidden, "WIDTH": width, "EXTRA": 1}
    for down, inputs in enumerate((hidden, width)):
        constants = sizes | module.ring_for(inputs).constants()
        compile_for_hopper("repacked_experts", constants | {"DOWN": down, "CLAMP": 1 - down})


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("few", [True, False])
def test_tiles_compile_for_hopper(columns: int, few: bool) -> None:
    sizes = {"TOP_K": 6, "HIDDEN": 4096, "WIDTH": 256, "EXTRA": 1, "FEW": int(few)}
    for down, tile in enumerate(module.tiles_for(4096, 256, columns, few)):
        constants = sizes | tile.constants() | {"DOWN": down, "CLAMP": 1 - down}
        compile_for_hopper("repacked_tiles", constants)
