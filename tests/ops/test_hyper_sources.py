# SPDX-License-Identifier: Apache-2.0
"""Leaving and entering layers on four streams in CUDA C++, compiled for this processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import draw
from tests.ops.test_cuda_sources import COMPILER, built, compile_for_hopper, places

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

CLOSE = """
extern "C" void run(const void* y, const void* streams, const float* post, const float* mix,
                    const float* weight, void* out, float* products, float* squares, int count) {
  run_blocks(PARTS * ((count + 127) / 128), 1, 32 * WARPS, 36 * 512, [=] {
    close_slices((const unsigned short*)y, (const unsigned short*)streams, post, mix, weight,
                 (unsigned short*)out, products, squares, count);
  });
}
"""

ENTER = """
extern "C" void run(const void* streams, const float* products, const float* squares,
                    const float* base, const float* scale, const void* gain, void* out, float* post,
                    float* mix, int count) {
  run_blocks(count, 1, THREADS + 32, 4 * (THREADS + 64), [=] {
    enter_layer((const unsigned short*)streams, products, squares, base, scale,
                gain, (unsigned short*)out, post, mix, 1e-6, 1e-6, 1e-5);
  });
}
"""


@pytest.mark.parametrize("tokens", [9, 141])
def test_a_layer_is_left_and_the_next_one_s_products_begun(tokens: int, tmp_path: Path) -> None:
    """The next streams to the last bit but one, products as exact as float32 is."""
    dim = 64
    run = built(tmp_path, "close_slices", CLOSE, {"DIM": dim})
    y, streams = draw(1, tokens, dim).bfloat16(), draw(2, tokens, 4, dim).bfloat16()
    post, mix, weight = draw(3, tokens, 4), draw(4, tokens, 4, 4), draw(5, 24, 4 * dim)
    weight[3] *= 2.0**-60
    out = torch.full_like(streams, torch.nan)
    products, squares = torch.full((tokens, 2, 24), torch.nan), torch.full((tokens, 2), torch.nan)
    run(*places(y, streams, post, mix, weight, out, products, squares), tokens)
    wanted = SPECIFICATIONS["hyper_close"](
        y.double(), streams.double(), post.double(), mix.double()
    )
    assert ((out.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-6).all()
    halves = out.double().view(tokens, 4, 2, 32).transpose(1, 2).flatten(2)
    rows = weight.double().view(24, 4, 2, 32).transpose(1, 2).flatten(2)
    exact = torch.einsum("tpk,mpk->tpm", halves, rows)
    size = torch.einsum("tpk,mpk->tpm", halves.abs(), rows.abs())
    assert ((products - exact).abs() <= 1e-6 * size).all()
    assert torch.allclose(squares.double(), halves.square().sum(-1), rtol=1e-6)


@pytest.mark.parametrize(("dim", "threads", "parts"), [(512, 64, 16), (1536, 64, 5)])
def test_a_layer_is_entered_as_specified(
    dim: int, threads: int, parts: int, tmp_path: Path
) -> None:
    constants = {"DIM": dim, "PARTS": parts, "THREADS": threads, "ITERATIONS": 20}
    constants["WIDE"] = int(dim == 512)
    run = built(tmp_path, "enter_layer", ENTER, constants)
    streams, weight = draw(1, 3, 4, dim).bfloat16() * 3, draw(2, 24, 4 * dim) / dim**0.5
    base, scale, gain = draw(3, 24), torch.tensor([0.5, 1.0, 2.0]), draw(4, dim)
    gain = gain if dim == 512 else gain.bfloat16()
    flat = streams.double().flatten(1)
    pieces = torch.arange(4 * dim) % parts
    masks = [flat.masked_fill(pieces != part, 0) for part in range(parts)]
    products = torch.stack([own @ weight.double().T for own in masks], 1).float()
    squares = torch.stack([own.square().sum(-1) for own in masks], 1).float()
    x = torch.full((3, dim), torch.nan, dtype=torch.bfloat16)
    post, mix = torch.full((3, 4), torch.nan), torch.full((3, 4, 4), torch.nan)
    given = streams, products, squares, base, scale, gain, x, post, mix
    run(*places(*given), 3)
    tail = 1e-6, 1e-6, 20, gain.double(), 1e-5
    args = streams.double(), weight.double(), base.double(), scale.double(), *tail
    wanted = SPECIFICATIONS["hyper_enter"](*args)
    assert (x.double() - wanted[0]).norm() <= 2**-8 * wanted[0].norm()
    assert torch.allclose(post.double(), wanted[1], rtol=1e-5, atol=1e-6)
    assert torch.allclose(mix.double(), wanted[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wide", [0, 1])
@pytest.mark.parametrize(("dim", "threads", "parts"), [(4096, 256, 128), (7168, 224, 56)])
def test_both_compile_for_hopper(dim: int, threads: int, parts: int, wide: int) -> None:
    compile_for_hopper("close_slices", {"DIM": dim})
    constants = {"DIM": dim, "PARTS": parts, "THREADS": threads, "ITERATIONS": 20, "WIDE": wide}
    compile_for_hopper("enter_layer", constants)
