# SPDX-License-Identifier: Apache-2.0
"""Kernels in CUDA C++ against the specifications, at the sizes that they are for."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels, repack_mxfp4
from freewheel.ops.codecs import quantise_blocks, quantise_mxfp4
from freewheel.ops.rows import write_index_keys
from tests.ops.cases import ints
from tests.ops.quantised_cases import repacked

LARGEST_ERROR = {True: 2**-6, False: 2e-5}
"""Over packed keys and others, of the largest logit."""


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    load_kernels("cuda")
    module: Any = importlib.import_module("freewheel.ops.cuda.native")
    if module.lacking() is not None:
        pytest.skip(f"nothing in CUDA C++ runs here: {module.lacking()}")
    yield


def shuffled_pages(batch: int, columns: int) -> tuple[Tensor, Tensor]:
    """(page table, rows), both on the device."""
    table = (torch.randperm(batch * columns) + 1).int().view(batch, columns)
    return table.cuda(), torch.arange(batch).int().flip(0).cuda()


@pytest.mark.parametrize("columns", [40, 64, 512, 2048])
@pytest.mark.parametrize("kind", ["random", "ties", "special", "equal", "one", "denormal"])
def test_topk_is_the_specification_s_bit_for_bit(kind: str, columns: int) -> None:
    torch.manual_seed(columns)
    length, k = columns * 64, 512 if columns == 40 else 2048
    table, rows = shuffled_pages(2, columns)
    logits = torch.randn(2, 3, length)
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "special":
        chance = torch.rand(logits.shape)
        logits = logits.masked_fill(chance < 0.3, math.nan).masked_fill(chance > 0.6, -math.inf)
        logits[0, 0, 3] = math.inf
    if kind == "equal":
        logits = torch.full_like(logits, -2.5)
    if kind == "one":
        logits = torch.zeros_like(logits)
        logits[:, :, 517] = 1
    if kind == "denormal":
        logits = logits * 1e-42
    lens = ints(length, length - 1, k, 0, k + 1, length // 2 + 5).view(2, 3).cuda()
    args = (logits.cuda(), table, rows, lens, 64, k)
    found = [IMPLEMENTATIONS["topk_slots", "cuda"](*args) for _ in range(3)]
    expected = SPECIFICATIONS["topk_slots"](*args)
    assert all(torch.equal(one, expected) for one in found)


def index_case(packed: bool, heads: int, width: int, page: int) -> tuple[Any, ...]:
    columns = 20480 // page
    table, rows = shuffled_pages(3, columns)
    length = columns * page
    ends = torch.tensor([length - width + 1, 70, 20])
    lens = (ends[:, None] + torch.arange(width)).int().cuda()
    query = torch.randn(3, width, heads, 128, device="cuda").bfloat16()
    query[0, 0, 1] = 0
    keys = torch.randn(3 * columns + 1, page, 128, device="cuda")
    if packed:
        cache = torch.full((*keys.shape[:2], 132), 255, dtype=torch.uint8, device="cuda")
        every = torch.arange(keys.shape[0] * page, device="cuda")
        write_index_keys(cache, keys, every.view(-1, page))
    else:
        cache = keys.bfloat16()
    return query, torch.randn(3, width, heads, device="cuda"), cache, table, rows, lens


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8, 11])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("packed", [True, False])
def test_index_logits_stay_within_their_error(
    packed: bool, heads: int, width: int, page: int
) -> None:
    torch.manual_seed(width)
    args = index_case(packed, heads, width, page)
    name = "fp8_index_logits" if packed else "index_logits"
    expected = SPECIFICATIONS[name](args[0], args[1].double(), *args[2:])
    for skip in (0, 75):
        found = IMPLEMENTATIONS[name, "cuda"](*args, skip)
        seen = expected.isfinite() & (args[5] > skip)[:, :, None]
        off = (found.double() - expected)[seen].abs().max()
        assert off <= LARGEST_ERROR[packed] * expected[seen].abs().max()
        if skip == 0:
            assert torch.equal(found.isneginf(), expected.isneginf())


def test_a_query_s_logits_do_not_depend_on_the_width() -> None:
    query, gates, *rest, lens = index_case(True, 64, 8, 64)
    together = IMPLEMENTATIONS["fp8_index_logits", "cuda"](query, gates, *rest, lens)
    for w in range(8):
        piece = slice(w, w + 1)
        args = (query[:, piece], gates[:, piece], *rest, lens[:, piece].contiguous())
        alone = IMPLEMENTATIONS["fp8_index_logits", "cuda"](*args)
        assert torch.equal(alone, together[:, piece])


@pytest.mark.parametrize("limit", [None, 2.5])
@pytest.mark.parametrize("tokens", [1, 8, 9, 40, 130, 400])
@pytest.mark.parametrize(("hidden", "width"), [(4096, 256), (7168, 384), (1024, 2048)])
def test_repacked_experts_stay_within_their_error(
    hidden: int, width: int, tokens: int, limit: float | None
) -> None:
    """Some experts with many tokens, one without any; the same bits at a second time."""
    torch.manual_seed(tokens)
    gate_up = quantise_mxfp4(torch.randn(9, 2 * width, hidden) / hidden**0.5)
    down = quantise_mxfp4(torch.randn(9, hidden, width) / width**0.5)
    ids = torch.rand(1, tokens, 8).argsort(-1)[..., :3].int()
    x = torch.randn(1, tokens, hidden).bfloat16()
    given = (x, *gate_up, *down, ids, torch.rand(1, tokens, 3), limit)
    args: list[Any] = [a.cuda() if isinstance(a, Tensor) else a for a in given]
    own = repacked(tuple(args))
    found = IMPLEMENTATIONS["repacked_experts", "cuda"](*own)
    expected = SPECIFICATIONS["mxfp4_experts"](args[0].double(), *args[1:])
    assert (found.double() - expected).norm() <= 2**-8 * expected.norm()
    assert torch.equal(IMPLEMENTATIONS["repacked_experts", "cuda"](*own), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 9, 32, 130, 1000])
def test_a_layer_on_streams_is_left_and_the_next_entered(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    left = (
        torch.randn(1, tokens, 4096).bfloat16(),
        torch.randn(1, tokens, 4, 4096).bfloat16(),
        torch.rand(1, tokens, 4),
        torch.rand(1, tokens, 4, 4) / 4,
    )
    own = (torch.randn(24, 4 * 4096) / 128, torch.randn(24), torch.ones(3), 1e-6, 1e-6, 20)
    norm = (torch.rand(4096).to(dtype), 1e-6)
    args: list[Any] = [a.cuda() if isinstance(a, Tensor) else a for a in (*left, *own, *norm)]
    streams, x, post, mix = IMPLEMENTATIONS["hyper_cross", "cuda"](*args)
    closed = SPECIFICATIONS["hyper_close"](*(a.double() for a in args[:4]))
    assert (streams.double() - closed).norm() <= 2**-8 * closed.norm()
    wide = [a.double() if isinstance(a, Tensor) else a for a in (streams, *args[4:])]
    entered = SPECIFICATIONS["hyper_enter"](*wide)
    assert (x.double() - entered[0]).norm() <= 2**-8 * entered[0].norm()
    assert torch.allclose(post.double(), entered[1], rtol=1e-5, atol=1e-6)
    assert torch.allclose(mix.double(), entered[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [8, 3])
@pytest.mark.parametrize("tokens", [1, 33])
def test_attention_with_sinks_is_the_same_alone(tokens: int, heads: int) -> None:
    """Lists with holes, one without entries; rows that nobody sees are not numbers."""
    torch.manual_seed(tokens)
    query = torch.randn(1, tokens, heads, 512, device="cuda").bfloat16() / 8
    keys, entries = (torch.randn(8, 64, 512, device="cuda").bfloat16() for _ in range(2))
    slots = torch.randint(-1, 256, (1, tokens, 128), device="cuda", dtype=torch.int32)
    picks = torch.randint(-1, 256, (1, tokens, 300), device="cuda", dtype=torch.int32)
    picks[:, 0], keys[4:], entries[4:] = -1, math.nan, math.nan
    args = (keys, slots, entries, picks, torch.randn(heads, device="cuda"), 0.5)
    body = IMPLEMENTATIONS["sink_attention", "cuda"]
    found = body(query, *args)
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    expected = SPECIFICATIONS["sink_attention"](query.double(), *wide)
    assert (found.double() - expected).norm() <= 4e-3 * expected.norm()
    one = (query[:, -1:], keys, slots[:, -1:], entries, picks[:, -1:], *args[4:])
    assert torch.equal(body(*one)[:, 0], found[:, -1])


def test_told_to_keep_one_order_a_token_s_sums_are_the_same_in_any_company() -> None:
    torch.manual_seed(1)
    x, ids = torch.randn(1, 70, 4096).bfloat16(), torch.rand(1, 70, 8).argsort(-1)[..., :3].int()
    gate_up = quantise_mxfp4(torch.randn(9, 512, 4096) / 64)
    down = quantise_mxfp4(torch.randn(9, 4096, 256) / 16)
    shares = torch.rand(1, 70, 3).cuda()
    pieces = repack_mxfp4(*gate_up, True), repack_mxfp4(*down, False)
    own = [a.cuda() for a in pieces]
    flat = [a.cuda() for a in quantise_blocks(torch.randn(1024, 4096) / 64)]
    x, ids = x.cuda(), ids.cuda()
    experts = IMPLEMENTATIONS["repacked_experts", "cuda"]
    linear = IMPLEMENTATIONS["block_linear", "cuda"]
    mixed = experts(x, *own, ids, shares, None, fixed=True)
    lines = linear(x, *flat, fixed=True)
    for count in (1, 8, 9, 40):
        few = (
            x[:, :count].contiguous(),
            ids[:, :count].contiguous(),
            shares[:, :count].contiguous(),
        )
        assert torch.equal(experts(few[0], *own, *few[1:], None, fixed=True), mixed[:, :count])
        assert torch.equal(linear(few[0], *flat, fixed=True), lines[:, :count])


ASKED = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 0, 0.95, 0.0), (1.0, 50, 1.0, 0.0)]
ASKED += [(0.8, 50, 0.95, 0.02), (0.7, 0, 1.0, 0.05), (2.0, 5000, 0.5, 0.0)]
"""Temperature, top-k, top-p, min-p; a row each."""


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "special"])
@pytest.mark.parametrize("vocabulary", [300, 5001, 16_384, 129_280])
def test_tokens_are_chosen_as_the_specification_says(vocabulary: int, kind: str) -> None:
    """Rows that filter beside others that do not, and the same at a second time."""
    torch.manual_seed(vocabulary)
    count = len(ASKED)
    logits = 2 * torch.randn(count, 3, vocabulary)
    if kind == "ties":
        logits = logits.bfloat16().float()
    if kind == "equal":
        logits = torch.zeros_like(logits)
    if kind == "special":
        logits[:, 0, vocabulary // 2] = math.nan
        logits[:, 1] = -math.inf
        logits[:, 2, : vocabulary - 5] = -math.inf
    columns = [torch.tensor(column) for column in zip(*ASKED, strict=True)]
    columns[1] = columns[1].int()
    stops = torch.full((count, 8), -1, dtype=torch.int32)
    stops[:, 2] = vocabulary - 1
    minimum = torch.full((count,), 9, dtype=torch.int32)  # of the first three rows alone
    positions = torch.arange(3 * count, dtype=torch.int32).view(count, 3)
    rows = torch.arange(count, dtype=torch.int32)
    seeds = 77 * torch.arange(count) - 5
    given = (logits, positions, rows, *columns, seeds, stops, minimum)
    args = [one.cuda() for one in given]
    found = [IMPLEMENTATIONS["choose", "cuda"](*args) for _ in range(2)]
    assert torch.equal(*found)
    assert torch.equal(found[0], SPECIFICATIONS["choose"](*args))


@pytest.mark.parametrize("tokens", [1, 8, 128, 300])
@pytest.mark.parametrize("size", [8, 16])
def test_one_block_lists_what_many_do(
    tokens: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = importlib.import_module("freewheel.ops.cuda.quantised_experts")
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, 256, device="cuda").argsort(-1)[:, :6].int()
    ids[: tokens // 3, 0], ids[tokens // 2, :2] = 9, -1
    own = module.list_tiles(ids, 256, size)
    monkeypatch.setattr(module, "MOST_PAIRS", 0)
    other = module.list_tiles(ids, 256, size)
    used = int((other.experts >= 0).sum()) * size
    assert torch.equal(own.experts, other.experts)
    assert torch.equal(own.lanes[:used], other.lanes[:used])
