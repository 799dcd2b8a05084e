# SPDX-License-Identifier: Apache-2.0
"""Leaving a layer on four streams in CUDA C++, compiled for this machine's processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import draw
from tests.ops.test_cuda_sources import COMPILER, built, places

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ENTRY = """
extern "C" void run(const void* y, const void* streams, const float* post, const float* mix,
                    const float* weight, void* out, float* products, float* squares, int count) {
  run_blocks(PARTS * ((count + 127) / 128), 1, 32 * WARPS, 36 * 512, [=] {
    close_slices((const unsigned short*)y, (const unsigned short*)streams, post, mix, weight,
                 (unsigned short*)out, products, squares, count);
  });
}
"""


@pytest.mark.parametrize("tokens", [9, 141])
def test_a_layer_is_left_and_the_next_one_s_products_begun(tokens: int, tmp_path: Path) -> None:
    """The next streams to the last bit but one, products as exact as float32 is."""
    dim = 64
    run = built(tmp_path, "close_slices", ENTRY, {"DIM": dim})
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
