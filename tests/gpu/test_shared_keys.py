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
    module: Any = importlib.import_module("freewheel.ops.cuda.shared_keys")
    if importlib.import_module("freewheel.ops.cuda.native").lacking() is not None:
        pytest.skip("CUDA C++ cannot be compiled here")
    return module


@pytest.mark.parametrize("k", [40, 500])
@pytest.mark.parametrize(("width", "heads"), [(2, 16), (3, 5), (4, 16), (8, 8)])
def test_a_key_read_once_counts_for_those_who_picked_it(
    monkeypatch: pytest.MonkeyPatch, width: int, heads: int, k: int
) -> None:
    module = keys_of()
    monkeypatch.setattr(module, "FEWEST", 0)
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


def test_the_list_is_every_picked_slot_once() -> None:
    """Of long rows, whose tables end in pages of other rows."""
    module = keys_of()
    pages = draw_pages(3, batch=3, width=4, columns=600, size=64)
    lens = ints(pages.length, 3000, 5)[:, None].expand(3, 4).contiguous()
    logits = draw(7, 3, 4, pages.length)
    slots = SPECIFICATIONS["topk_slots"](logits, pages.table, pages.rows, lens, 64, 2048)
    table = pages.table.clone()
    table[pages.rows[1].long(), 100:] = pages.table[pages.rows[1].long(), :500]  # stale
    row = module.Row(slots.cuda(), table.cuda(), pages.rows.cuda(), 64)
    lanes, marks, counts = (one.cpu() for one in module.union(row))
    for b in range(3):
        every = pages.slots_of(b, torch.arange(pages.length))
        picked = torch.stack([torch.isin(every, own[own >= 0]) for own in slots[b]])
        listed = picked.any(0)
        count = int(listed.sum())
        assert counts[b] == count
        assert torch.equal(lanes[b, :count], every[listed].int())
        bits = (picked.int() << torch.arange(4)[:, None]).sum(0)[listed]
        assert torch.equal(marks[b, :count], bits.int())
        assert (lanes[b, count:] == -1).all() and (marks[b, count:] == 0).all()
