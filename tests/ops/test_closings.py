# SPDX-License-Identifier: Apache-2.0
"""Which windows close, from where they are read and whereto they are written: loops agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel import ops
from freewheel.ops.compressed import closings
from tests.ops.cases import Pages, draw, draw_pages, ints, rope_angles

RATIOS = st.sampled_from([(2, 1), (4, 2), (4, 1), (8, 1), (8, 2)])


def rectangle(start: int, count: int, width: int) -> tuple[Tensor, Tensor]:
    """positions and kv_lens, int32 [1, W], of `count` queries from `start` on."""
    column = torch.arange(width)
    positions = torch.where(column < count, start + column, 0).int()[None]
    return positions, torch.where(column < count, positions + 1, 0).int()


def tables(seed: int) -> tuple[Pages, Pages]:
    """Pages of raw rows and of entries: 40 tokens a row in each."""
    return draw_pages(seed, 1, 1, columns=10, size=4), draw_pages(seed + 1, 1, 1, columns=5, size=8)


@given(
    start=st.integers(0, 30),
    count=st.integers(0, 10),
    spare=st.integers(0, 3),
    kind=RATIOS,
    seed=st.integers(0, 99),
)
@settings(max_examples=300, deadline=None)
def test_the_plan_equals_a_loop_over_the_positions(
    start: int, count: int, spare: int, kind: tuple[int, int], seed: int
) -> None:
    ratio, windows = kind
    width, span = max(1, count + spare), ratio * windows
    raw, entries = tables(seed)
    rows = raw.rows
    positions, kv_lens = rectangle(start, count, width)
    page_rows = entries.size // ratio
    found = ops.plan_closings(
        positions, kv_lens, rows, raw.table, entries.table, raw.size, page_rows, ratio, span
    )
    closing = [(p + 1) // ratio - 1 for p in range(start, start + count) if (p + 1) % ratio == 0]
    assert len(closing) <= closings(width, ratio) == found[0].shape[1]
    dead = found[0].shape[1] - len(closing)
    assert found[0][0].tolist() == closing + [-1] * dead
    row = int(rows[0])
    slots = [int(entries.table[row, w // page_rows]) * page_rows + w % page_rows for w in closing]
    assert found[1][0].tolist() == slots + [0] * dead
    for w, own in zip(closing, found[2][0].tolist(), strict=False):
        for lane, slot in zip(range((w + 1) * ratio - span, (w + 1) * ratio), own, strict=True):
            want = -1 if lane < 0 else int(raw.table[row, lane // 4]) * 4 + lane % 4
            assert slot == want
    assert (found[2][0, len(closing) :] == -1).all()


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_a_window_holds_the_latest_tokens_and_itself(length: int, window: int, seed: int) -> None:
    pages = draw_pages(seed, 1, 1, columns=10, size=4)
    found = ops.window_slots(pages.table, pages.rows, ints(length)[None], 4, window)[0, 0]
    positions = list(range(length - window, length))
    row = int(pages.rows[0])
    want = [-1 if p < 0 else int(pages.table[row, p // 4]) * 4 + p % 4 for p in positions]
    assert found.tolist() == want


@pytest.mark.parametrize("lens", [[0, 0, 0], [0, 1, 2], [3, 9, 10]])
def test_all_entries_below_the_length_are_listed_and_no_other(lens: list[int]) -> None:
    """Tokens 0 to 3 have none: a length of zero is nothing special."""
    pages = draw_pages(3, 1, 3, columns=5, size=8)
    found = ops.entry_slots(pages.table, pages.rows, ints(*lens)[None], 2)[0]
    row = int(pages.rows[0])
    for own, length in zip(found.tolist(), lens, strict=True):
        slots = [int(pages.table[row, e // 2]) * 2 + e % 2 for e in range(length)]
        assert own == slots + [-1] * (10 - length)


def compressed(
    raw: Tensor, bias: Tensor, norm: Tensor, windows: list[int], raw_slots: Tensor
) -> Tensor:
    """float64 [K, D]: the entries that the op stores for those windows."""
    dim, count = norm.shape[0], len(windows)
    cache = torch.full((1, count + 1, dim), torch.nan, dtype=torch.float64)
    at = torch.arange(1, count + 1)[None]
    table = rope_angles(64, min(4, dim))
    ops.compress(cache, raw, bias, norm, 1e-6, table, ints(*windows)[None], at, raw_slots[None])
    return cache[0, 1:]


@pytest.mark.parametrize("overlapping", [False, True])
def test_an_entry_is_the_gated_mean_of_its_window_and_of_the_one_before(overlapping: bool) -> None:
    """Channel by channel, in loops; the first window has none before it."""
    ratio, dim, windows = 4, 6, [0, 1, 2]
    channels = dim * (1 + overlapping)
    kv, gate = (draw(n, 12, channels, dtype=torch.float64) for n in (1, 2))
    bias, norm = draw(3, ratio, channels, dtype=torch.float64), draw(4, dim, dtype=torch.float64)
    span = ratio * (1 + overlapping)
    sources = [[t if t >= 0 else -1 for t in range((w + 1) * ratio - span, (w + 1) * ratio)]
               for w in windows]  # fmt: skip
    raw = torch.cat((kv, gate), dim=1)[None]
    found = compressed(raw, bias, norm, windows, torch.tensor(sources, dtype=torch.int32))
    for w in windows:
        mixed = torch.zeros(dim, dtype=torch.float64)
        for d in range(dim):
            lanes = [(t, d + dim * overlapping) for t in range(w * ratio, (w + 1) * ratio)]
            if overlapping and w:
                lanes += [(t, d) for t in range((w - 1) * ratio, w * ratio)]
            gates = torch.stack([gate[t, c] + bias[t % ratio, c] for t, c in lanes]).softmax(0)
            mixed[d] = sum(g * kv[t, c] for g, (t, c) in zip(gates, lanes, strict=True))
        normed = mixed / (mixed.square().mean() + 1e-6).sqrt() * norm
        cos, sin = rope_angles(64, 4)[w * ratio].double().chunk(2)
        first, second = normed[2::2], normed[3::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), 1).flatten()
        assert torch.allclose(found[w], torch.cat((normed[:2], turned)), atol=1e-12)


def test_the_bias_lies_as_in_the_checkpoint_the_earlier_windows_half_first() -> None:
    """ape is [ratio, 2 * D]: one row a position, and beside each other what a token gives to the
    next window's entry and to its own. A bias of 100 in one place picks one source."""
    ratio, dim = 4, 2
    kv = torch.arange(8 * 4, dtype=torch.float64).view(8, 4) + 1
    raw = torch.cat((kv, torch.zeros(8, 4, dtype=torch.float64)), dim=1)[None]
    sources = torch.arange(8, dtype=torch.int32)[None]
    for position in range(ratio):
        for half in range(2):
            bias = torch.zeros(ratio, 2 * dim, dtype=torch.float64)
            bias[position, half * dim : (half + 1) * dim] = 100.0
            source = kv[half * ratio + position, half * dim : (half + 1) * dim]
            found = compressed(raw, bias, torch.ones(dim, dtype=torch.float64), [0], sources)
            assert torch.allclose(found[0], source / source.square().mean().sqrt(), rtol=1e-6)


def test_poison_behind_dead_lanes_and_in_scratch_stays_there() -> None:
    raw = torch.full((1, 8, 8), torch.nan, dtype=torch.float64)
    raw[0, 4:] = draw(1, 4, 8, dtype=torch.float64)
    sources = torch.tensor([[-1, -1, -1, -1, 4, 5, 6, 7], [-1] * 8], dtype=torch.int32)
    bias, norm = draw(2, 4, 4, dtype=torch.float64), draw(3, 2, dtype=torch.float64)
    cache = torch.zeros(1, 3, 2, dtype=torch.float64)
    table = rope_angles(64, 2)
    ops.compress(
        cache,
        raw,
        bias,
        norm,
        1e-6,
        table,
        ints(0, -1)[None],
        torch.tensor([[1, 0]]),
        sources[None],
    )
    assert cache.isfinite().all()
