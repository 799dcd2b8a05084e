# SPDX-License-Identifier: Apache-2.0
"""FP8 experts in one launch, compiled for this machine's processor, against the specification."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import Sizes
from tests.ops.quantised_cases import expert_arguments, shared_blocks
from tests.ops.test_cuda_sources import COMPILER, Call, built, compile_for_hopper, places

pytest.importorskip("triton")
module: Any = importlib.import_module("freewheel.ops.cuda.joined_experts")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ENTRY = """
extern "C" void run(const void* x, const float* up_scale, const float* down_scale,
                    const float* shared_up_scale, const float* shared_down_scale, const int* ids,
                    const float* shares, void* inner, void* out, const Map* maps, int bytes,
                    float limit, int pairs, int blocks) {
  run_blocks(blocks, blocks, EVERYONE, bytes, [=] {
    joined_experts((const unsigned short*)x, up_scale, down_scale, shared_up_scale,
                   shared_down_scale, ids, shares, (unsigned short*)inner, (unsigned short*)out,
                   maps[0], maps[1], maps[2], maps[3], limit, pairs, blocks);
  });
}
"""
HIDDEN, WIDTH, EXPERTS, TOP_K, EXTRA, STAGES = 512, 256, 5, 3, 2, 3
BYTES = module.shared_bytes(STAGES, HIDDEN, WIDTH)


class Map(ctypes.Structure):
    """As `on_host.h` has it."""

    _fields_ = [
        ("start", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("box", ctypes.c_uint32 * 5),
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Call:
    sizes = {"TOP_K": TOP_K, "HIDDEN": HIDDEN, "WIDTH": WIDTH, "EXTRA": EXTRA}
    constants = sizes | {"STAGES": STAGES, "CLAMP": 1}
    return built(tmp_path_factory.mktemp("built"), "joined_experts", ENTRY, constants)


def maps_of(up: Tensor, down: Tensor, shared_up: Tensor, shared_down: Tensor) -> Any:
    """Of gates and ups, of outputs, and of both of the shared expert."""
    found = []
    for pair in ((up, down), (shared_up, shared_down)):
        for one in module.boxes_of(*(part.view(torch.uint8) for part in pair)):
            sizes, strides = (ctypes.c_uint64 * 5)(*one.sizes), (ctypes.c_uint64 * 5)(*one.strides)
            found.append(Map(one.address, sizes, strides, (ctypes.c_uint32 * 5)(*one.box)))
    return (Map * 4)(*found)


def found(source: Any, args: tuple[Any, ...], blocks: int) -> Tensor:
    """What the kernel makes of the arguments of `block_experts`, whose limit is not None."""
    x, up, up_scale, down, down_scale, ids, weights, limit, *behind = args
    x, ids, shares, pairs = x.flatten(0, -2), ids.reshape(-1, TOP_K), weights.float(), ids.numel()
    inner = torch.full(((pairs + EXTRA) * len(x), WIDTH), torch.nan, dtype=torch.bfloat16)
    out = torch.full_like(x, torch.nan)
    given = places(x, up_scale, down_scale, behind[1], behind[3], ids, shares, inner, out)
    source(
        *given, maps_of(up, down, behind[0], behind[2]), BYTES, ctypes.c_float(limit), pairs, blocks
    )
    return out


def arguments(tokens: int, seed: int = 1) -> list[Any]:
    of = Sizes(1, tokens, seed, torch.bfloat16)
    args = expert_arguments("block_experts", of, EXPERTS, WIDTH, HIDDEN, TOP_K, 0.4)
    return [*args, *shared_blocks(7, EXTRA * WIDTH, HIDDEN)]


def check(source: Any, args: tuple[Any, ...], blocks: int) -> None:
    expected = SPECIFICATIONS["block_experts"](args[0].double(), *args[1:]).view(-1, HIDDEN)
    off = (found(source, args, blocks).double() - expected).norm()
    assert off <= 2**-8 * expected.norm()  # of bfloat16 between the two projections


@pytest.mark.parametrize("blocks", [8, 11])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_the_source_agrees(source: Any, tokens: int, blocks: int) -> None:
    """Twice, since a launch leaves its counters as it found them."""
    for seed in (1, 2):
        check(source, tuple(arguments(tokens, seed)), blocks)


def test_inputs_may_be_far_apart(source: Any) -> None:
    """Of one token, and those of tokens: each has a scale of its own."""
    args = arguments(4)
    args[0] = args[0] * torch.tensor([1e-12, 1, 1e3, 1e10])[:, None].bfloat16()
    args[0][..., ::7] *= 512
    expected = SPECIFICATIONS["block_experts"](args[0].double(), *args[1:]).view(-1, HIDDEN)
    off = (found(source, tuple(args), 9).double() - expected).norm(dim=-1)
    assert (off <= 2**-7 * expected.norm(dim=-1)).all()


def test_choices_of_nobody_are_left_out(source: Any) -> None:
    """As where experts are dealt out, and others hold those that most tokens chose."""
    args = arguments(4)
    args[5] = args[5].masked_fill(args[5] > 1, -1)
    args[5][:, -1] = -1
    check(source, tuple(args), 9)


def test_an_expert_that_a_token_chose_twice_counts_twice(source: Any) -> None:
    args = arguments(4)
    args[5][..., 2] = args[5][..., 0]
    check(source, tuple(args), 9)


def test_a_token_s_bits_are_the_same_alone_and_in_company(source: Any) -> None:
    args = arguments(4)
    together = found(source, tuple(args), 9)
    for token in range(4):
        alone = [a[:, token : token + 1] if i in (0, 5, 6) else a for i, a in enumerate(args)]
        assert torch.equal(found(source, tuple(alone), 12)[0], together[token])


def test_what_it_does_not_compute_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lacking", lambda: None)
    monkeypatch.setattr(module, "processors", lambda _: 132)

    def taken(
        tokens: int = 4, hidden: int = HIDDEN, width: int = WIDTH, at: int = 0, shared: int = WIDTH
    ) -> bool:
        def weights(lead: tuple[int, ...], width: int) -> Any:
            up = torch.zeros(2 * width * hidden + at, dtype=torch.uint8)[at:]
            up = up.view(1, 2 * width, hidden).expand(*lead, -1, -1) if lead else up
            down = torch.zeros((*lead, hidden, width), dtype=torch.uint8)
            return module.BlockWeights(up, torch.ones(1), down, torch.ones(1))

        x = torch.zeros(1, tokens, hidden, dtype=torch.bfloat16)
        ids = torch.zeros(1, tokens, TOP_K, dtype=torch.int32)
        return module.takes(x, weights((2,), width), ids, weights((), shared))

    assert taken() and taken(tokens=1) and taken(hidden=7168) and taken(shared=2 * WIDTH)
    assert not taken(tokens=5)
    assert not taken(hidden=HIDDEN + 256) and not taken(hidden=8704)
    assert not taken(width=128) and not taken(width=768)
    assert not taken(at=8)
    assert not taken(shared=WIDTH + 128) and not taken(shared=9 * WIDTH)
    monkeypatch.setattr(module, "lacking", lambda: "no compiler")
    assert not taken()


@pytest.mark.parametrize("hidden", [4096, 6144, 7168])
def test_it_compiles_for_hopper(hidden: int) -> None:
    sizes = {"TOP_K": 8, "HIDDEN": hidden, "WIDTH": 256, "EXTRA": 1, "CLAMP": 1}
    sizes |= {"STAGES": module.STAGES}
    compile_for_hopper("joined_experts", sizes, "sm_90a")
