# SPDX-License-Identifier: Apache-2.0
"""The kernel that attends for all queries of a row, compiled for this machine's processor."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import draw, draw_pages
from tests.ops.test_cuda_sources import built, places, pytestmark

__all__ = ["pytestmark"]

ENTRY = """
extern "C" void run(const void* query, const void* latent, const int* slots, const int* table,
                    const int* rows, void* out, float* part_out, float* high, float* total,
                    int* lists, float scale, int batch, int width, int k, int heads, int columns,
                    int size, int room, int log_parts) {
  run_blocks(batch << log_parts, 1, THREADS, 232448, [=] {
    attend_rows((const unsigned char*)query, (const unsigned char*)latent, slots, table, rows,
                (unsigned short*)out, part_out, high, total, lists, scale, width, k, heads, columns,
                columns, size, room, log_parts);
  });
}
"""


@pytest.mark.parametrize(
    ("width", "heads", "k", "log_parts", "columns", "size"),
    [
        (4, 16, 150, 1, 20, 256),  # lists inside
        (3, 5, 40, 2, 20, 32),  # a table of pages that is nearly full
        (8, 8, 9, 0, 20, 256),  # one part, less than a tile
        (2, 32, 90, 1, 80, 256),  # marks inside, slots outside
        (4, 16, 150, 0, 200, 512),  # both outside; several tiles
    ],
)
def test_all_queries_of_a_row_attend_to_what_each_picked(
    tmp_path: Path, width: int, heads: int, k: int, log_parts: int, columns: int, size: int
) -> None:
    run = built(tmp_path, "attend_rows", ENTRY, {"PAGE": 16, "WHOLE": int(log_parts == 0)})
    pages = draw_pages(k, batch=2, width=width, columns=columns, size=16)
    lens = pages.kv_lens.clone()
    lens[0], lens[1] = pages.length - width + torch.arange(width), 10
    logits = draw(7, 2, width, pages.length)
    slots = SPECIFICATIONS["topk_slots"](logits, pages.table, pages.rows, lens, 16, k)
    slots[0, 1] = -1  # a query without a key
    latent = draw(1, pages.count, 16, 576)
    unseen = torch.ones(pages.count * 16, dtype=torch.bool)
    unseen[slots[slots >= 0].long()] = False
    latent.view(-1, 576)[unseen] = math.nan
    latent, query = latent.bfloat16(), draw(2, 2, width, heads, 576).bfloat16()
    parts, room = 1 << log_parts, 64 * -(-columns * 16 // 64)
    out = torch.full((2, width * heads, 512), math.nan, dtype=torch.bfloat16)
    mixed = torch.full((2, parts, width * heads, 512), math.nan)
    high, total = torch.full((2, 2, parts, width * heads), math.nan)
    lists = torch.full((2 * parts, room + room // 4), -7, dtype=torch.int32)
    given = places(query, latent, slots, pages.table, pages.rows, out, mixed, high, total, lists)
    scale = ctypes.c_float(0.05 * math.log2(math.e))
    run(*given, scale, 2, width, k, heads, columns, size, room, log_parts)
    found = out.double()
    if parts > 1:
        share = (high - high.amax(1, keepdim=True).clamp(min=-1e30)).exp().double()
        whole = (total * share).sum(1)
        mixed = torch.where(total[..., None] > 0, mixed, 0.0)
        found = (mixed * share[..., None]).sum(1) / whole.masked_fill(whole == 0, 1)[..., None]
    expected = SPECIFICATIONS["sparse_mla"](query.double(), latent.double(), slots, 0.05, 512)
    expected = expected.flatten(1, 2)
    assert (found - expected).norm() <= 4e-3 * expected.norm()
    assert (found - expected).abs().max() <= 2**-6 * expected.abs().max()
    assert (found[0, heads : 2 * heads] == 0).all()
