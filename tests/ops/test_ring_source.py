# SPDX-License-Identifier: Apache-2.0
"""Projections fed by rings, compiled for this machine's processor, against the specification."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import draw
from tests.ops.quantised_cases import block_scaled
from tests.ops.test_cuda_sources import COMPILER, built, compile_for_hopper, places

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ENTRY = """
Map rows_of(const char* start, unsigned rows, unsigned width, unsigned count) {
  return {(const unsigned char*)start, {width, rows, 1, 1, 1}, {1, width, 0, 0, 0},
          {128, count, 1, 1, 1}};
}
extern "C" void run(const char* x, const char* weight, const float* scale, Result* out, int tokens,
                    int outputs, int inputs, int share, int parts, int scale_rows) {
  Map x_map = rows_of(x, tokens, 2 * inputs, TOKENS), own = rows_of(weight, outputs, inputs, ROWS);
  int tiles = (outputs + ROWS - 1) / ROWS, pieces = (tokens + TOKENS - 1) / TOKENS;
  int bytes = 1024 + STAGES * STAGE + CODES * CODE_STAGE + 2 * (STAGES + CODES) * sizeof(Arrival);
  run_blocks(tiles * parts * pieces, 1, THREADS, bytes, [=] {
    ring_products(x_map, own, scale, out, tokens, outputs, inputs / STEP, share, parts,
                  scale_rows);
  });
}
"""


@pytest.mark.parametrize(
    ("sizes", "tokens", "outputs", "inputs", "parts", "block_n"),
    [
        ((32, 2, 3), 20, 328, 640, 1, 128),  # more steps than stages, outputs that are not there
        ((32, 4, 4), 40, 256, 384, 2, 256),  # fewer; a scale of two tiles
        ((64, 2, 2), 64, 136, 512, 2, 128),
        ((128, 3, 2), 130, 256, 640, 2, 128),  # a last part of fewer steps
    ],
)
def test_products_agree_with_the_specification(
    tmp_path: Path,
    sizes: tuple[int, ...],
    tokens: int,
    outputs: int,
    inputs: int,
    parts: int,
    block_n: int,
) -> None:
    constants = dict(zip(("TOKENS", "STAGES", "CODES"), sizes, strict=True))
    run = built(tmp_path, "ring_products", ENTRY, constants | {"WIDE": int(parts > 1), "FP8": 0})
    x = draw(1, tokens, inputs).bfloat16()
    weight, scale = block_scaled(2, outputs, inputs)
    scale = scale[:: block_n // 128].contiguous()
    kind = torch.float32 if parts > 1 else torch.bfloat16
    out = torch.full((parts, tokens, outputs), float("nan"), dtype=kind)
    share = -(-inputs // 128 // parts)
    run(*places(x, weight, scale, out), tokens, outputs, inputs, share, parts, block_n)
    expected = SPECIFICATIONS["block_linear"](x.double(), weight, scale, block_n, 128)
    error = (out.double().sum(0) - expected).norm() / expected.norm()
    assert error < (1e-6 if parts > 1 else 2**-8)


@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_it_compiles_for_hopper(tokens: int) -> None:
    constants = {"TOKENS": tokens, "STAGES": 4, "CODES": 4, "WIDE": 1, "FP8": 0}
    compile_for_hopper("ring_products", constants)
