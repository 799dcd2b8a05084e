# SPDX-License-Identifier: Apache-2.0
"""The text of kernels with their layouts written out, run without a card: see `explicit_host`."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS, load_kernels
from tests.ops.cases import draw, draw_pages, draw_slots
from tests.ops.explicit_host import Block, block, raw_fp8, stand_in
from tests.ops.packed_cases import RANK, ROPE, filled, poisoned

pytest.importorskip("triton")


def module_of(name: str) -> Any:
    load_kernels("cuda")
    return importlib.import_module(f"freewheel.ops.cuda.{name}")


def widened(codes: Tensor, scale: Tensor) -> Block:
    """`many_heads._widen`: scales as two bfloat16 numbers, the result rounded once."""
    first = scale.bfloat16()
    rest = (scale - first.float()).bfloat16()
    wide = raw_fp8(codes).float()
    return block((wide * first.float() + (wide * rest.float()).bfloat16().float()).bfloat16())


def joined(run: Any) -> Tensor:
    """float32 [N, H, V] of runs that were left."""
    shift = run.high.amax(1, keepdim=True)
    share = (run.high - shift.clamp(min=-1e30)).exp()
    total = (run.total * share).sum(1)
    mixed = torch.where(run.total[..., None] > 0, run.mixed * share[..., None], 0).sum(1)
    return torch.where(total[..., None] > 0, mixed / total[..., None], 0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [None, 128, 64])
def test_many_heads_attend_as_specified(
    monkeypatch: pytest.MonkeyPatch, length: int | None, packed: bool
) -> None:
    module, runs = module_of("many_heads"), module_of("runs")
    monkeypatch.setattr(module, "_attend", stand_in(module, _widen=widened))
    pages = draw_pages(3, batch=1, width=3, columns=60, size=4)
    slots = draw_slots(3, pages, 180, 3)
    slots[0, 1, 128:] = -1  # runs without a lane
    slots[0, 2] = -1  # a query without a key
    query = draw(4, 1, 3, 70, RANK + ROPE).bfloat16()
    listed = slots[slots >= 0].unique().long()
    if packed:
        latent = poisoned(filled("latents", 3, pages.count), listed)
        rows, name = module.packed_rows(latent), "fp8_sparse_mla"
    else:
        latent = torch.full((pages.count * 4, RANK + ROPE), math.nan).bfloat16()
        latent[listed] = draw(5, len(listed), RANK + ROPE).bfloat16()
        latent = latent.view(pages.count, 4, -1)
        rows, name = module.plain_rows(latent), "sparse_mla"
    out = torch.full((3, 70, RANK), math.nan).bfloat16()
    lanes = length or 192
    parts = -(-180 // lanes)
    run = runs.Run(query[0], slots[0], out, parts, lanes, *runs.unjoined(out, parts))
    for room in (run.mixed, run.high, run.total):
        room.fill_(math.nan)
    module.attend(run, module.TILE, rows, 0.02)
    found = (out if parts == 1 else joined(run)).double()
    wanted = SPECIFICATIONS[name](
        query.double(), latent if packed else latent.double(), slots, 0.02, RANK
    )[0]
    assert (found - wanted).norm() <= 4e-3 * wanted.norm()
    assert (found[2] == 0).all()
