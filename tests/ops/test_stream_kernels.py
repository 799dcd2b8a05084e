# SPDX-License-Identifier: Apache-2.0
"""The Triton bodies of DeepSeek-V4's ops against the specifications: on a GPU, or interpreted.

TRITON_INTERPRET=1 python -m pytest tests/ops/test_stream_kernels.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from tests.ops import nobody_cases
from tests.ops.cases import Sizes, draw, draw_pages, generator, ints, rope_angles
from tests.ops.kernel_device import DEVICE, HAS_GPU, needs_kernels
from tests.ops.step_cases import HEAVY_CASES, STEP_CASES, WINDOW_CASES, results
from tests.ops.stream_cases import STREAM_CASES, distinct

pytestmark = needs_kernels

STORES = ("store_key", "store_raw", "compress")
MATRIX_OPS = (
    "sink_attention",
    "window_attention",
    "clamped_experts",
    "project_raw",
    "shared_products",
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
"""Of the largest expected value, or of 1 if that is larger."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels("cuda")


def run(name: str, args: tuple[Any, ...], *, kernel: bool) -> tuple[Tensor, ...]:
    """On the CPU: what the kernel gives, or the specification in float64."""
    if kernel:
        own = tuple(a.to(DEVICE, copy=True) if isinstance(a, Tensor) else a for a in args)
        result = IMPLEMENTATIONS[name, "cuda"](*own)
    else:
        own = tuple(
            a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
        )
        own = tuple(a.clone() if isinstance(a, Tensor) else a for a in own)
        result = SPECIFICATIONS[name](*own)
    if name == "compress":
        own[0][0, 0] = 0  # scratch: where windows go that are none, if anywhere
    many = (own[0],) if name in STORES else result if isinstance(result, tuple) else (result,)
    return tuple(t.cpu() for t in many)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape
    if not expected.is_floating_point():
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
        return
    assert actual.isfinite().all() and expected.isfinite().all()
    if expected.numel():
        error = (actual.double() - expected).abs().max().item()
        assert error <= TOLERANCE[dtype] * max(1.0, expected.abs().max().item())


def check(name: str, args: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> None:
    if not HAS_GPU and dtype == torch.bfloat16 and name in MATRIX_OPS:
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices; mm is the card's")
    found, expected = run(name, args, kernel=True), run(name, args, kernel=False)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, dtype)


@DTYPES
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", sorted(STREAM_CASES))
def test_a_kernel_agrees_with_its_specification(name: str, seed: int, dtype: torch.dtype) -> None:
    batch, width = [(1, 1), (2, 3), (3, 9), (4, 1), (0, 2)][seed]
    check(name, STREAM_CASES[name](name, Sizes(batch, width, seed, dtype)), dtype)


@DTYPES
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", sorted(STEP_CASES))
def test_a_step_agrees_with_its_specification(name: str, seed: int, dtype: torch.dtype) -> None:
    """bfloat16 is rounded between the ops that a step joins, so the specification is too."""
    if not HAS_GPU and dtype == torch.bfloat16 and name in MATRIX_OPS:
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices")
    batch, width = [(1, 1), (2, 3), (3, 9), (4, 1), (0, 2), (2, 20)][seed]
    for cases in (STEP_CASES, HEAVY_CASES, WINDOW_CASES):
        if name in cases:
            args = cases[name](Sizes(batch, width, seed, dtype))
            own = tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args)
            found = results(name, IMPLEMENTATIONS[name, "cuda"], own)
            wanted = results(name, SPECIFICATIONS[name], args)
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype == other.dtype
                assert_near(one.cpu(), other.double(), dtype)


@pytest.mark.parametrize(("streams", "dim"), [(4, 40), (3, 1030)])
def test_a_layer_is_entered_alike_at_all_widths(streams: int, dim: int) -> None:
    rows, size = (2 + streams) * streams, streams * dim
    x, weight = draw(1, 1, 5, streams, dim) * 3, draw(2, rows, size) / size**0.5 * 2
    args = (x, weight, draw(3, rows), ints(1, 2, 3).float(), 1e-6, 1e-6, 20, draw(4, dim), 1e-5)
    check("hyper_enter", args)


@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_a_layer_is_left_and_the_next_entered_alike_at_all_widths(tokens: int) -> None:
    streams, dim = 4, 260
    rows, size = (2 + streams) * streams, streams * dim
    left = (
        draw(1, 1, tokens, dim),
        draw(2, 1, tokens, streams, dim) * 3,
        draw(3, 1, tokens, streams),
        draw(4, 1, tokens, streams, streams),
    )
    weight = draw(5, rows, size) / size**0.5 * 2
    entered = (draw(6, rows), ints(1, 2, 3).float(), 1e-6, 1e-6, 20, draw(7, dim), 1e-5)
    check("hyper_cross", (*left, weight, *entered))


def test_every_op_of_the_family_has_a_kernel() -> None:
    named = STREAM_CASES.keys() | STEP_CASES.keys()
    assert {name for name in named if (name, "cuda") not in IMPLEMENTATIONS} == set()


@pytest.mark.parametrize("name", sorted(STREAM_CASES))
def test_a_poisoned_neighbour_changes_nothing(name: str) -> None:
    args = STREAM_CASES[name](name, Sizes(batch=3, width=4))
    bad = [
        a.clone().index_fill_(0, torch.tensor([1]), float("nan"))
        if isinstance(a, Tensor) and a.is_floating_point() and a.shape[:2] == (3, 4)
        else a
        for a in args
    ]
    clean, dirty = run(name, args, kernel=True), run(name, tuple(bad), kernel=True)
    for result in zip(clean, dirty, strict=True):
        if name in STORES:
            slots = args[7 if name == "compress" else -1][[0, 2]].flatten()
            one, other = (t.flatten(0, 1)[slots] for t in result)
        else:
            one, other = (t[[0, 2]] for t in result)
        assert torch.equal(one, other) and one.isfinite().all()


@DTYPES
@pytest.mark.parametrize("dim", [24, 128, 512])
def test_heads_of_all_widths_are_normed_and_turned(dim: int, dtype: torch.dtype) -> None:
    table, positions = rope_angles(90, 16), ints(89, 3, 0, 7).view(2, 2)
    x = draw(1, 2, 2, 5, dim).to(dtype)
    check("open_query", (x, 1e-6, positions, table), dtype)
    check("rope_tail", (x, positions, table, True), dtype)
    slots, weight = torch.tensor([[3, 8], [1, 0]]), draw(3, dim)
    check("store_key", (draw(2, 3, 4, dim).to(dtype), x[:, :, 0], weight, 1e-6, positions, table,
                        slots), dtype)  # fmt: skip


def test_slots_follow_no_page_behind_what_a_query_sees() -> None:
    pages = draw_pages(4, batch=3, width=2, columns=6, size=8)
    lens = ints(0, 9, 16, 15, 1, 0).view(3, 2)
    stale = pages.table.clone()
    stale[:, 2:] = 10**6
    for name, tail in (("window_slots", (8, 5)), ("entry_slots", (8,))):
        found = run(name, (stale, pages.rows, lens, *tail), kernel=True)[0]
        wanted = run(name, (pages.table, pages.rows, lens, *tail), kernel=False)[0]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("ratio", "windows"), [(4, 2), (8, 1), (128, 1)])
@pytest.mark.parametrize("width", [1, 5, 8, 300, 1100])
def test_every_window_that_closes_is_planned(width: int, ratio: int, windows: int) -> None:
    """Rows with no query, with few, and with as many as there are, somewhere in a window."""
    chance, span = generator(width), windows * ratio
    start = torch.randint(0, 300, (4, 1), generator=chance)
    lens = ints(0, 1, width, (width + 1) // 2)[:, None]
    column = torch.arange(width)
    positions = torch.where(column < lens, start + column, 0).int()
    kv_lens = torch.where(column < lens, positions + 1, 0).int()
    raw = draw_pages(1, batch=4, width=1, columns=90, size=16)
    entries = draw_pages(2, batch=4, width=1, columns=360, size=1)
    args = (positions, kv_lens, raw.rows, raw.table, entries.table, 16, 1, ratio, span)
    found, wanted = (run("plan_closings", args, kernel=kernel) for kernel in (True, False))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@DTYPES
@pytest.mark.parametrize(
    ("ratio", "dim", "overlap"), [(4, 40, True), (128, 40, False), (4, 512, True), (8, 24, False)]
)
def test_entries_are_mixed_of_listed_rows_alone(
    ratio: int, dim: int, overlap: bool, dtype: torch.dtype
) -> None:
    """All other rows are NaN; so are those of the cache, where no entry is written."""
    span, channels = (2 * ratio, 2 * dim) if overlap else (ratio, dim)
    windows = ints(0, -1, 5, 2).view(2, 2)
    count = 4 * span
    raw_slots = torch.randperm(count + 16, generator=generator(1))[:count].view(2, 2, span).int()
    raw_slots[0, 0, : span - ratio] = -1  # the window before the first
    raw_slots[0, 1] = -1
    raw = torch.full((-(-(count + 16) // 16), 16, 2 * channels), float("nan"))
    live = raw_slots[raw_slots >= 0].long()
    raw.flatten(0, 1)[live] = draw(2, live.shape[0], 2 * channels) * 3
    cache = torch.full((3, 4, dim), 7.0, dtype=dtype)
    write_slots = torch.tensor([[5, 0], [9, 4]])
    args = (cache, raw, draw(3, ratio, channels), draw(4, dim), 1e-6, rope_angles(5 * ratio + 1, 8),
            windows, write_slots, raw_slots)  # fmt: skip
    found = run("compress", args, kernel=True)[0]
    args = (*args[:1], raw.nan_to_num(0), *args[2:])
    assert_near(found, run("compress", args, kernel=False)[0], dtype)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "dim", "lanes", "picks"), [(2, 24, 150, 70), (17, 64, 128, 1), (4, 40, 1, 0)]
)
def test_attention_with_sinks_agrees_over_several_parts(
    dtype: torch.dtype, heads: int, dim: int, lanes: int, picks: int
) -> None:
    """Lanes dead anywhere, whole parts of them, and NaN behind every row that none lists."""
    keys, entries = draw(1, 12, 16, dim).to(dtype), draw(2, 40, 2, dim).to(dtype)
    slots = torch.randint(1, 192, (2, 2, lanes), generator=generator(3), dtype=torch.int32)
    others = torch.randint(1, 80, (2, 2, picks), generator=generator(4), dtype=torch.int32)
    slots, others = distinct(slots), distinct(others)
    slots[0, 1, 64:128] = -1
    slots[1, 1], others[1, 1] = -1, -1
    others[0, 0] = -1
    for cache, own in ((keys, slots), (entries, others)):
        unlisted = torch.ones(cache.shape[0] * cache.shape[1], dtype=torch.bool)
        unlisted[own[own >= 0].long()] = False
        cache.view(-1, dim)[unlisted] = float("nan")
    query, sinks = draw(5, 2, 2, heads, dim).to(dtype), draw(6, heads) * 2
    check("sink_attention", (query, keys, slots, entries, others, sinks, 0.3), dtype)


def test_wide_rectangles_go_through_attention_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freewheel.ops.cuda.sink_parts.SCRATCH", 2 * 4 * 24 * 3)
    name, of = "sink_attention", Sizes(batch=2, width=5)
    check(name, STREAM_CASES[name](name, of))


@DTYPES
@pytest.mark.parametrize(("streams", "dim", "tokens"), [(4, 40, 1), (4, 300, 6), (3, 1030, 2)])
def test_streams_are_opened_closed_and_collapsed(
    streams: int, dim: int, tokens: int, dtype: torch.dtype
) -> None:
    x, size = draw(1, 1, tokens, streams, dim).to(dtype) * 3, streams * dim
    rows = (2 + streams) * streams
    weight, base = draw(2, rows, size) / size**0.5 * 2, draw(3, rows)
    opened = (x, weight, base, ints(1, 2, 3).float(), 1e-6, 1e-6, 20)
    check("hyper_open", opened, dtype)
    _, post, mix = run("hyper_open", opened, kernel=True)
    check("hyper_close", (draw(4, 1, tokens, dim).to(dtype), x, post, mix), dtype)
    head = (x, weight[:streams], base[:streams], torch.tensor([1.5]), 1e-6, 1e-6)
    check("hyper_collapse", head, dtype)


def test_a_mix_is_balanced_on_both_sides() -> None:
    args = STREAM_CASES["hyper_open"]("hyper_open", Sizes(batch=3, width=2))
    mix = run("hyper_open", args, kernel=True)[2]
    assert (mix.sum(-2) - 1).abs().max() < 1e-4 and (mix.sum(-1) - 1).abs().max() < 0.1


@pytest.mark.parametrize("experts", [6, 256])
def test_routes_agree_with_ties_and_with_scores_of_all_sizes(experts: int) -> None:
    """Scores span from exp(-30) to 60; equal ones go to the lowest index."""
    logits = draw(1, 3, 4, experts).round() * 12
    bias = draw(2, experts).round() / 8
    found, wanted = (
        run("route_best", (logits, bias, 6, 1.5), kernel=kernel) for kernel in (True, False)
    )
    assert_near(found[0], wanted[0], torch.float32)
    assert torch.equal(found[1], wanted[1])
    tokens = ints(*range(12)).view(3, 4)
    table = torch.rand((12, experts), generator=generator(3)).argsort(-1)[:, :6].int()
    check("route_by_token", (logits, table, tokens, 1.5))


def test_ids_are_experts_whatever_the_scores() -> None:
    logits = torch.full((1, 2, 6), float("nan"))
    ids = run("route_best", (logits, torch.zeros(6), 3, 1.5), kernel=True)[1]
    assert ids.tolist() == [[[0, 1, 2]] * 2]


@pytest.mark.parametrize("tokens", [1, 40])
def test_clamped_experts_agree_when_many_tokens_choose_the_same(tokens: int) -> None:
    ids = (torch.rand((1, tokens, 6), generator=generator(1)) + torch.arange(6) * 0.3).argsort(-1)
    x, shares = draw(2, 1, tokens, 48), draw(3, 1, tokens, 3)
    args = (x, draw(4, 6, 40, 48), draw(5, 6, 48, 20), ids[..., :3].int(), shares, 2.5)
    check("clamped_experts", args)


@pytest.mark.parametrize("tokens", [4, 40])
def test_a_choice_of_nobody_adds_nothing_and_reads_nothing(tokens: int) -> None:
    name = "clamped_experts"
    args = nobody_cases.arguments(name, tokens, torch.float32)
    given = (
        a.to(DEVICE) if isinstance(a, Tensor) else a
        for a in nobody_cases.with_broken_first(name, args)
    )
    found = IMPLEMENTATIONS[name, "cuda"](*given).cpu()
    torch.testing.assert_close(
        found, nobody_cases.expected(name, args).float(), rtol=2e-5, atol=2e-5
    )
