# SPDX-License-Identifier: Apache-2.0
"""Attention that reads a key once for all queries of a row, against each query's own."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from tests.ops.cases import draw, draw_pages, ints

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper card",
)


def keys_of() -> Any:
    load_kernels("cuda")
    module: Any = importlib.import_module("freewheel.ops.cuda.row_attention")
    if importlib.import_module("freewheel.ops.cuda.native").lacking() is not None:
        pytest.skip("CUDA C++ cannot be compiled here")
    return module


@pytest.mark.parametrize("parts", [1, 4, 16])
@pytest.mark.parametrize("k", [40, 500])
@pytest.mark.parametrize(("width", "heads"), [(2, 16), (3, 5), (4, 16), (8, 8)])
def test_a_key_read_once_counts_for_those_who_picked_it(
    monkeypatch: pytest.MonkeyPatch, width: int, heads: int, k: int, parts: int
) -> None:
    module = keys_of()
    monkeypatch.setattr(module, "FEWEST", 0)
    monkeypatch.setattr(module, "parts_for", lambda own: parts)
    pages = draw_pages(k, batch=4, width=width, columns=12, size=64)
    lens = pages.kv_lens.clone()
    lens[0], lens[1], lens[2] = pages.length - width + torch.arange(width), 20, 0
    logits = draw(7, 4, width, pages.length)
    slots = SPECIFICATIONS["topk_slots"](logits, pages.table, pages.rows, lens, 64, k)
    latent = draw(1, pages.count, 64, 576)
    unseen = torch.ones(pages.count * 64, dtype=torch.bool)
    unseen[slots[slots >= 0].long()] = False
    latent.view(-1, 576)[unseen] = math.nan
    latent, query = latent.bfloat16(), draw(2, 4, width, heads, 576).bfloat16()
    row = module.Row(slots.cuda(), pages.table.cuda(), pages.rows.cuda(), 64)
    given = (query.cuda(), latent.cuda(), row.slots, 0.05, 512)
    assert module.serves(given[0], 512, row)
    body = IMPLEMENTATIONS["sparse_mla", "cuda"]
    found = body(*given, page_table=row.page_table, rows=row.rows).cpu().double()
    expected = SPECIFICATIONS["sparse_mla"](query.double(), latent.double(), slots, 0.05, 512)
    off = (found - expected).abs().max().item()
    assert off <= 2**-6 * expected.abs().max().item()
    assert (found - expected).norm() <= 4e-3 * expected.norm()
    again = body(*given, page_table=row.page_table, rows=row.rows).cpu().double()
    assert torch.equal(found, again)


def test_long_rows_are_read_by_their_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows whose tables end in pages of other rows, and one whose lists leave the block."""
    module = keys_of()
    monkeypatch.setattr(module, "FEWEST", 0)
    pages = draw_pages(3, batch=8, width=4, columns=600, size=64)
    lens = ints(pages.length, 3000, 5, 9000, 2048, 1, 20000, 4096)[:, None].expand(8, 4)
    logits = draw(7, 8, 4, pages.length)
    args = (logits, pages.table, pages.rows, lens.contiguous(), 64, 2048)
    slots = SPECIFICATIONS["topk_slots"](*args)
    table = pages.table.clone()
    table[pages.rows[1].long(), 100:] = pages.table[pages.rows[1].long(), :500]  # stale
    latent = draw(1, pages.count, 64, 576).bfloat16()
    query = draw(2, 8, 4, 16, 576).bfloat16()
    row = module.Row(slots.cuda(), table.cuda(), pages.rows.cuda(), 64)
    given = (query.cuda(), latent.cuda(), row.slots, 0.05, 512)
    assert module.serves(given[0], 512, row)
    body = IMPLEMENTATIONS["sparse_mla", "cuda"]
    found = body(*given, page_table=row.page_table, rows=row.rows).double()
    expected = SPECIFICATIONS["sparse_mla"](given[0].float(), given[1].float(), *given[2:])
    assert (found - expected).norm() <= 4e-3 * expected.norm()
