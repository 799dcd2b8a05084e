# SPDX-License-Identifier: Apache-2.0
"""Attention over windows with 64 heads a program: the kernel's text, run without a card.

On a card, the kernel itself: `tests/gpu/test_window_kernels.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS, load_kernels
from tests.ops.explicit_host import Block, block, raw_fp8, stand_in
from tests.ops.window_cases import widened, window_call

pytest.importorskip("triton")


def exact(codes: Tensor, scale: Tensor) -> Block:
    """`key_codes._widen`: powers of two round nothing."""
    return block(raw_fp8(codes) * scale)


def launched(
    monkeypatch: pytest.MonkeyPatch, given: tuple[Any, ...], packed: bool, length: int | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Any]:
    """out [N, H, D], parts that are left, and the module, in runs of `length` lanes."""
    load_kernels("cuda")
    module: Any = importlib.import_module("freewheel.ops.cuda.window_heads")
    parts_of: Any = importlib.import_module("freewheel.ops.cuda.sink_parts")
    monkeypatch.setattr(module, "_attend", stand_in(module, _widen=exact))
    query, keys, slots, entries, picks, sinks, scale, positions, table = given
    rows = module.packed_rows if packed else module.plain_rows
    lists = (rows(keys), slots[0]), (rows(entries), picks[0])
    out = torch.full(query[0].shape, torch.nan).bfloat16()
    close = parts_of.Close(sinks, positions[0], table, table.shape[1])
    tiles = module.tiles_of(slots[0], picks[0])
    each = tiles if length is None else length // 64
    rooms = (out, out, out) if each >= tiles else parts_of.room_for(out, -(-tiles // each))
    for room in rooms:
        room.fill_(torch.nan)
    module._launch(query[0], *lists, rooms, scale, close, out, each)
    return out, rooms, close


def joined(rooms: tuple[Tensor, Tensor, Tensor], sinks: Tensor) -> Tensor:
    """float32 [N, H, D] of parts, not turned; those without a lane are not read."""
    mixed, high, total = rooms
    shift = torch.maximum(high.amax(1), sinks)
    share = (high - shift[:, None]).exp()
    sums = (total * share).sum(1) + (sinks - shift).exp()
    mixed = torch.where(total[..., None] > 0, mixed * share[..., None], 0).sum(1)
    return mixed / sums[..., None]


SIZES = (
    pytest.param(70, 150, 200, None, id="whole"),
    pytest.param(40, 128, 1, None, id="one entry"),
    pytest.param(64, 70, 0, None, id="no entry"),
    pytest.param(64, 150, 200, 128, id="runs across both lists"),
    pytest.param(33, 64, 200, 64, id="a tile a run"),
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "lanes", "picks", "length"), SIZES)
def test_the_text_attends_as_specified(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    lanes: int,
    picks: int,
    length: int | None,
    packed: bool,
) -> None:
    given = window_call(heads, lanes, picks, packed)
    out, rooms, close = launched(monkeypatch, given, packed, length)
    name = "fp8_window_attention" if packed else "window_attention"
    wanted = SPECIFICATIONS[name](*widened(given))[0]
    found = out.double()
    if length is not None:
        found = joined(rooms, close.sinks).double()
        found = SPECIFICATIONS["rope_tail"](found[None], given[7], given[8], True)[0]
    for n in range(len(wanted)):
        assert (found[n] - wanted[n]).norm() <= 4e-3 * wanted[n].norm()
    assert (found[2] == 0).all()  # of no lane
    turned, same = found[..., -64:], wanted[..., -64:]
    assert (turned - same).norm() <= 4e-3 * same.norm()


def test_few_heads_are_left_to_the_kernels_that_are_faster_for_them() -> None:
    load_kernels("cuda")
    chosen: Any = importlib.import_module("freewheel.ops.cuda.window_heads").is_in_front
    assert chosen(4, 64, False) and chosen(8, 32, False) and chosen(4, 32, True)
    assert chosen(32, 16, False) and chosen(128, 16, True)
    assert not chosen(1, 64, False) and not chosen(4, 32, False) and not chosen(1, 64, True)
    assert not chosen(4, 16, True) and not chosen(128, 8, False)
