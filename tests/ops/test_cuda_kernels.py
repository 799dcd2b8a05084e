# SPDX-License-Identifier: Apache-2.0
"""The Triton bodies against the specifications: on a GPU, or without one in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/ops/test_cuda_kernels.py
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from tests.ops import nobody_cases
from tests.ops.adjust_cases import adjust_case
from tests.ops.cases import (
    CASES,
    Sizes,
    arguments,
    draw,
    draw_pages,
    generator,
    ints,
    rope_angles,
)
from tests.ops.grammar_cases import grammar_case
from tests.ops.guide_cases import guide_case, mask_letter
from tests.ops.kernel_device import DEVICE, HAS_GPU, needs_kernels

pytestmark = needs_kernels

STORES = ("store_latent", "store_index_key", "norm_latents", "index_queries", "place_queries")
EXACT = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
"""Of the largest expected value, or of 1 if that is larger."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    load_kernels("cuda")
    yield


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args)


def wide(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Floats in float64, but for rotary tables, which are float32 always."""
    return tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.shape == expected.shape
    if not expected.is_floating_point():
        assert torch.equal(actual, expected)
        return
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    assert torch.equal(actual[expected.isinf()].double(), expected[expected.isinf()].double())
    if finite.any():
        wanted = expected[finite].double()
        error = (actual[finite].double() - wanted).abs().max().item()
        assert error <= EXACT[dtype] * max(1.0, wanted.abs().max().item())


MATRIX_OPS = (
    "index_logits",
    "sparse_mla",
    "sparse_mla_values",
    "grouped_experts",
    "absorb_query",
    "place_queries",
    "expand_values",
)


def listed(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def check(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    """The kernel on `args` against the specification in float64 on the CPU."""
    if not HAS_GPU and dtype == torch.bfloat16 and name in MATRIX_OPS:
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices")
    given = on_device(tuple(a.clone() if isinstance(a, Tensor) else a for a in args))
    precise = wide(args)
    found, expected = IMPLEMENTATIONS[name, "cuda"](*given), SPECIFICATIONS[name](*precise)
    if name in STORES:
        assert_near(given[0], precise[0], dtype)
    for one, other in zip(listed(found), listed(expected), strict=True):
        assert_near(one, other, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_kernel_agrees_with_its_specification(name: str, seed: int, dtype: torch.dtype) -> None:
    batch, width = [(1, 1), (2, 3), (3, 9), (4, 1)][seed]
    check(name, arguments(name, Sizes(batch, width, seed, dtype)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_logits_agree_over_many_pages_and_heads(dtype: torch.dtype) -> None:
    pages = draw_pages(5, batch=2, width=9, columns=6, size=32)
    keys = draw(1, pages.count, 32, 24).to(dtype)
    query, gates = draw(2, 2, 9, 20, 24).to(dtype), draw(3, 2, 9, 20)
    check("index_logits", (query, gates, keys, pages.table, pages.rows, pages.kv_lens), dtype)


def test_index_logits_do_not_follow_what_a_query_does_not_see() -> None:
    pages = draw_pages(6, batch=2, width=2, columns=4, size=16)
    lens = ints(5, 20, 0, 0).view(2, 2)
    keys = draw(1, pages.count, 16, 16)
    clean = keys.clone()
    for b in range(2):
        for t in range(int(lens[b].max()), pages.length):
            slot = int(pages.slots_of(b, torch.tensor([t]))[0])
            keys.view(-1, 16)[slot] = float("nan")
    table = pages.table.clone()
    table[pages.rows.long(), 2:] = 10**6  # stale page numbers
    query, gates = draw(2, 2, 2, 3, 16), draw(3, 2, 2, 3)
    body = IMPLEMENTATIONS["index_logits", "cuda"]
    found = body(*on_device((query, gates, keys, table, pages.rows, lens)))
    expected = SPECIFICATIONS["index_logits"](query, gates, clean, pages.table, pages.rows, lens)
    assert_near(found, expected, torch.float32)


@pytest.mark.parametrize("k", [1, 7, 64, 300])
@pytest.mark.parametrize("kind", ["random", "ties", "special"])
def test_topk_takes_the_best_and_of_equals_the_lowest_positions(kind: str, k: int) -> None:
    pages = draw_pages(k, batch=2, width=4, columns=40, size=16)
    logits = draw(7, 2, 4, pages.length)
    if kind == "ties":
        logits = (logits * 2).round() / 2  # few values, both zeros among them
    if kind == "special":
        chance = torch.rand(logits.shape, generator=generator(1))
        logits = logits.masked_fill(chance < 0.3, float("nan")).masked_fill(
            chance > 0.6, float("-inf")
        )
        logits[0, 0, 3] = float("inf")
    lens = pages.kv_lens.clone()
    lens[0, 0], lens[1, 1] = pages.length, 0
    args = (logits, pages.table, pages.rows, lens, 16, k)
    found = IMPLEMENTATIONS["topk_slots", "cuda"](*on_device(args))
    assert torch.equal(found.cpu(), SPECIFICATIONS["topk_slots"](*args))


@pytest.mark.parametrize("deepest", [8, 1])
@pytest.mark.parametrize("values", ["few", "many", "equal", "one"])
def test_topk_agrees_for_rows_of_all_lengths(
    monkeypatch: pytest.MonkeyPatch, deepest: int, values: str
) -> None:
    """By one program, and by several with few and with many candidates for the threshold.

    In Triton, which stands in where CUDA C++ cannot be compiled.
    """
    short = importlib.import_module("freewheel.ops.cuda.selection")
    monkeypatch.setattr(short, "lacking", lambda: "a test asks for the stand-in")
    long = importlib.import_module("freewheel.ops.cuda.long_selection")
    monkeypatch.setattr(short, "LANES", 256)
    monkeypatch.setattr(short, "DEEPEST", deepest)
    monkeypatch.setattr(long, "TILE", 512)
    monkeypatch.setattr(long, "FEW", 256)
    pages = draw_pages(3, batch=4, width=2, columns=20, size=64)
    logits = draw(8, 4, 2, pages.length) * 8
    if values == "few":
        logits = logits.round()
    if values == "equal":
        logits = torch.ones_like(logits)
    if values == "one":
        logits = torch.where(logits > 20, 1e-42, -1e-42)  # denormal, and of one bin or two
        logits[2, 0, 7] = 1e30
    logits[3, 1] = math.nan if values == "many" else 1.0
    lens = ints(pages.length, 1100, 900, 200, 60, 1025, 513, pages.length - 3).view(4, 2)
    for k in (64, 100):
        args = (logits, pages.table, pages.rows, lens, 64, k)
        found = IMPLEMENTATIONS["topk_slots", "cuda"](*on_device(args))
        assert torch.equal(found.cpu(), SPECIFICATIONS["topk_slots"](*args))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_logits_for_a_selection_agree_where_it_looks(dtype: torch.dtype, width: int) -> None:
    pages = draw_pages(width, batch=4, width=width, columns=7, size=32)
    lens = pages.kv_lens.clone()
    lens[0], lens[1] = pages.length - width + torch.arange(width), 20  # a long row and a short one
    query, gates = draw(2, 4, width, 5, 24).to(dtype), draw(3, 4, width, 5)
    args = (query, gates, draw(1, pages.count, 32, 24).to(dtype), pages.table, pages.rows, lens)
    if not HAS_GPU and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices")
    found = IMPLEMENTATIONS["index_logits", "cuda"](*on_device(args), 48).cpu()
    expected = SPECIFICATIONS["index_logits"](*wide(args))
    seen = expected.isfinite() & (lens > 48)[..., None]
    assert seen.any()
    assert_near(found[seen], expected[seen], dtype)
    picked = IMPLEMENTATIONS["topk_slots", "cuda"](*on_device((found, *args[3:], 32, 48)))
    if dtype == torch.float32:
        expected = SPECIFICATIONS["topk_slots"](expected, *args[3:], 32, 48)
        assert torch.equal(picked.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "value", "rope"), [(2, 32, 8), (17, 48, 16)])
def test_sparse_attention_agrees_over_several_parts(
    dtype: torch.dtype, heads: int, value: int, rope: int
) -> None:
    latent = draw(1, 12, 16, value + rope).to(dtype)
    query = draw(2, 2, 2, heads, value + rope).to(dtype)
    slots = torch.randint(0, 192, (2, 2, 150), generator=generator(3), dtype=torch.int32)
    slots[0, 0, 10:] = -1
    slots[0, 1, 64:128] = -1  # a whole part
    slots[1, 1] = -1
    slots[1, 0, ::3] = -1
    latent.view(-1, value + rope)[0] = float("nan")
    slots[slots == 0] = -1
    for fixed in (False, True):
        check("sparse_mla", (query, latent, slots, 0.2, value, fixed), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "heads", "lanes"), [(2, 16, 300), (9, 8, 150), (17, 16, 40)])
def test_values_of_what_is_attended_to_agree(
    width: int, heads: int, lanes: int, dtype: torch.dtype
) -> None:
    """By runs that are joined as they are projected, by one run, and by too many queries for it."""
    latent, query = draw(1, 12, 16, 576).to(dtype), draw(2, 2, width, heads, 576).to(dtype)
    slots = torch.randint(1, 192, (2, width, lanes), generator=generator(3), dtype=torch.int32)
    slots[0, 0, 10:] = -1
    slots[1, 1] = -1
    latent.view(-1, 576)[0] = float("nan")
    up = (draw(4, heads, 512, 128) / 512**0.5).to(dtype)
    check("sparse_mla_values", (query, latent, slots, 0.05, up), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "lanes"), [(33, 40), (64, 150), (128, 300)])
def test_many_heads_agree_at_the_published_widths(
    heads: int, lanes: int, dtype: torch.dtype
) -> None:
    latent, query = draw(1, 12, 16, 576).to(dtype), draw(2, 2, 2, heads, 576).to(dtype)
    slots = torch.randint(1, 192, (2, 2, lanes), generator=generator(3), dtype=torch.int32)
    slots[0, 0, 10:] = -1
    slots[1, 1] = -1
    slots[1, 0, ::3] = -1
    latent.view(-1, 576)[0] = float("nan")
    for fixed in (False, True):
        check("sparse_mla", (query, latent, slots, 0.05, 512, fixed), dtype)


@pytest.mark.parametrize("run", [64, 128, 192])
def test_a_query_s_lanes_may_be_split_anywhere(monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    module = importlib.import_module("freewheel.ops.cuda.runs")
    monkeypatch.setattr(module, "lanes_of_run", lambda *_: run)
    latent, query = draw(1, 12, 16, 40), draw(2, 2, 2, 3, 40)
    slots = torch.randint(0, 192, (2, 2, 150), generator=generator(3), dtype=torch.int32)
    slots[0, 0, 10:], slots[0, 1, 64:128], slots[1, 1] = -1, -1, -1
    check("sparse_mla", (query, latent, slots, 0.2, 32), torch.float32)


def test_sparse_attention_of_no_queries_is_empty() -> None:
    query, latent = torch.zeros(0, 2, 16, 80), torch.zeros(1, 8, 80)
    slots = torch.zeros(0, 2, 4, dtype=torch.int32)
    found = IMPLEMENTATIONS["sparse_mla", "cuda"](*on_device((query, latent, slots)), 1.0, 64)
    assert found.shape == (0, 2, 16, 64)


def test_runs_are_whole_tiles_and_few_where_there_are_many_queries() -> None:
    split = importlib.import_module("freewheel.ops.cuda.runs")
    tile = importlib.import_module("freewheel.ops.cuda.attention").FEW_HEADS
    runs = [split.lanes_of_run(programs, 2048, tile) for programs in (1, 4, 32, 64, 128, 4096)]
    assert runs == sorted(runs)
    assert all(run % tile.step == 0 for run in runs)
    assert runs[0] == tile.step and runs[-1] == 2048


@pytest.mark.parametrize("tokens", [1, 33, 70])
def test_products_of_a_head_agree_for_many_tokens(tokens: int) -> None:
    for dtype in (torch.float32, torch.bfloat16) if HAS_GPU else (torch.float32,):
        query, up = draw(1, 1, tokens, 3, 24).to(dtype), (draw(2, 3, 16, 48) / 4).to(dtype)
        positions = torch.arange(tokens, dtype=torch.int32)[None]
        check("absorb_query", (query, up, positions, rope_angles(tokens, 8), True), dtype)
        mixed, down = draw(3, 1, tokens, 3, 48).to(dtype), (draw(4, 3, 48, 16) / 7).to(dtype)
        check("expand_values", (mixed, down), dtype)


@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_agree_when_many_tokens_choose_the_same(tokens: int) -> None:
    ids = (torch.rand((1, tokens, 6), generator=generator(1)) + torch.arange(6) * 0.3).argsort(-1)
    x, shares = draw(2, 1, tokens, 48), draw(3, 1, tokens, 3)
    args = (x, draw(4, 6, 40, 48), draw(5, 6, 48, 20), ids[..., :3].int(), shares)
    check("grouped_experts", args, torch.float32)


@pytest.mark.parametrize(("groups", "kept", "experts"), [(8, 4, 256), (1, 1, 24), (2, 1, 12)])
def test_routes_agree_with_ties(groups: int, kept: int, experts: int) -> None:
    logits, bias = draw(1, 2, 5, experts).round(), draw(2, experts).round() / 8
    check("route", (logits, bias, groups, kept, 4, True, 2.5), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_wide_projections_agree(tokens: int, dtype: torch.dtype) -> None:
    x, weight = draw(1, 1, tokens, 1500).to(dtype), draw(2, 37, 1500) / 40
    found = IMPLEMENTATIONS["wide_linear", "cuda"](*on_device((x, weight)))
    assert_near(found, SPECIFICATIONS["wide_linear"](x, weight.double()), torch.float32)


def sampling_state(rows: int, seed: int) -> tuple[Tensor, ...]:
    rng = random.Random(seed)
    warm = [rng.choice([0.0, 0.7, 1.0, 1.6]) for _ in range(rows)]
    top_k = [rng.choice([0, 1, 3, 40]) for _ in range(rows)]
    top_p = [rng.choice([1.0, 0.3, 0.9]) for _ in range(rows)]
    min_p = [rng.choice([0.0, 0.05]) for _ in range(rows)]
    stops = torch.full((rows, 8), -1, dtype=torch.int32)
    stops[:, 0] = 3
    seeds = torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(rows)])
    return (
        torch.tensor(warm),
        ints(*top_k),
        torch.tensor(top_p),
        torch.tensor(min_p),
        seeds,
        stops,
        ints(*([12] * rows)),
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_the_specification_s(seed: int, ties: bool) -> None:
    rows, choices, vocabulary = 8, 3, 5000 if seed == 0 else 300
    state = sampling_state(rows, seed)
    logits = draw(seed, rows, choices, vocabulary) * 3
    logits = logits.round() if ties else logits
    positions = torch.arange(rows * choices, dtype=torch.int32).view(rows, choices)
    logits[1, 1, 7], logits[2, 0], logits[4, 2, vocabulary - 1] = math.nan, -math.inf, math.nan
    args = (logits, positions, torch.arange(rows, dtype=torch.int32), *state)
    found = IMPLEMENTATIONS["choose", "cuda"](*on_device(args))
    assert torch.equal(found.cpu(), SPECIFICATIONS["choose"](*args))


def test_what_does_not_filter_is_the_best_of_its_blocks() -> None:
    rows, vocabulary = 4, 5000
    warm, top_k, top_p, min_p, *rest = sampling_state(rows, 1)
    state = (warm, torch.zeros_like(top_k), torch.ones_like(top_p), torch.zeros_like(min_p), *rest)
    args = (
        draw(3, rows, 2, vocabulary) * 3,
        torch.arange(2 * rows, dtype=torch.int32).view(rows, 2),
        torch.arange(rows, dtype=torch.int32),
        *state,
    )
    module: Any = importlib.import_module("freewheel.ops.cuda.choosing")
    values, tokens = module.best_of_blocks(None, *on_device(args))
    best = tokens.gather(1, values.argmax(1, keepdim=True)).view(rows, 2).cpu()
    assert torch.equal(best, SPECIFICATIONS["choose"](*args))


@pytest.mark.parametrize("seed", range(6))
def test_adjusted_logits_are_the_specification_s(seed: int) -> None:
    args = adjust_case(seed, choices=1 + seed % 4)
    found = IMPLEMENTATIONS["adjust", "cuda"](*on_device(args)).cpu()
    live = args[1] >= args[1][:, :1]  # padding queries may come out as they like
    assert_near(found[live], SPECIFICATIONS["adjust"](*args)[live], torch.float32)


@pytest.mark.parametrize("seed", range(8))
def test_grammars_are_followed_as_the_specification_follows_them(seed: int) -> None:
    case = grammar_case(seed, choices=1 + seed % 4)
    found = IMPLEMENTATIONS["constrain", "cuda"](*on_device(case.arguments)).cpu()
    expected = SPECIFICATIONS["constrain"](*case.arguments)
    live = case.positions >= case.positions[:, :1]
    assert torch.equal(found[live], expected[live])
    start = case.computed_lens[case.rows.long()]
    results = []
    for body, device in (
        (SPECIFICATIONS["follow"], "cpu"),
        (IMPLEMENTATIONS["follow", "cuda"], DEVICE),
    ):
        states = case.grammar_states.clone().to(device)
        args = (case.tokens, case.rows, start, ints(seed % 3, 1, 2, 0, 1), case.uses)
        more = (case.prompt_lens, case.grammars)
        moved = on_device((*args, *more)) if device != "cpu" or not HAS_GPU else (*args, *more)
        body(*moved, states, case.tables.to(device), case.logits.shape[2], 4)
        results.append(states.cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_guided_as_the_specification_guides_them(seed: int) -> None:
    args = guide_case(seed, choices=1 + seed % 4)
    found = IMPLEMENTATIONS["guide", "cuda"](*on_device(args))
    for one, other in zip(found, SPECIFICATIONS["guide"](*args), strict=True):
        assert torch.equal(one.cpu(), other)


def test_masks_are_kept_as_the_specification_keeps_them() -> None:
    rows, words = mask_letter(1)
    lens, masks = ints(*range(7)), torch.arange(14, dtype=torch.int32).view(7, 2)
    kept = lens.to(DEVICE, copy=True), masks.to(DEVICE, copy=True)
    IMPLEMENTATIONS["apply_masks", "cuda"](rows.to(DEVICE), words.to(DEVICE), *kept)
    SPECIFICATIONS["apply_masks"](rows, words, lens, masks)
    assert torch.equal(kept[0].cpu(), lens) and torch.equal(kept[1].cpu(), masks)


def test_a_table_is_stored_as_the_specification_stores_it() -> None:
    words = torch.randint(-(2**31), 2**31, (2 + 3000,), generator=generator(1)).int()
    words[:2] = ints(11, 5001)
    tables = torch.zeros(6000, dtype=torch.int16, device=DEVICE)
    expected = torch.zeros(6000, dtype=torch.int16)
    IMPLEMENTATIONS["store_table", "cuda"](words.to(DEVICE), tables)
    SPECIFICATIONS["store_table"](words, expected)
    assert torch.equal(tables.cpu(), expected)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocabulary", [7, 300, 5000])
def test_scores_are_the_specification_s(vocabulary: int, ties: bool) -> None:
    logits = draw(vocabulary, 2, 3, vocabulary) * 3
    logits = logits.round() if ties else logits
    logits[0, 1, 2], logits[1, 0, 3] = math.nan, -math.inf
    targets = ints(-1, 2, 6, 3, 0, 1).view(2, 3)
    found = IMPLEMENTATIONS["score", "cuda"](*on_device((logits, targets)), 20).cpu()
    expected = SPECIFICATIONS["score"](logits, targets, 20)
    assert torch.equal(found[..., 1:21], expected[..., 1:21])
    for part in (slice(0, 1), slice(21, None)):
        one, other = (
            words[..., part].contiguous().view(torch.float32) for words in (found, expected)
        )
        assert_near(one, other, torch.float32)


@pytest.mark.parametrize("seed", range(3))
def test_adjustments_arrive_as_the_specification_takes_them(seed: int) -> None:
    results = []
    for body, device in (
        (SPECIFICATIONS["apply_adjustments"], "cpu"),
        (IMPLEMENTATIONS["apply_adjustments", "cuda"], DEVICE),
    ):
        columns = [c.clone() for c in adjust_case(seed, choices=1)[5:]]
        columns.insert(2, torch.ones(6, 5, dtype=torch.int32))
        sizes = sum(c[0].numel() for c in columns)
        columns.insert(3, torch.ones(6, dtype=torch.int32))
        words = torch.randint(-(2**20), 2**20, (4, 1 + sizes), generator=generator(seed)).int()
        words[:, 0] = ints(1, 0, 15, 0)
        args = (ints(2, 1, 3, 0), words, *columns)
        moved = [a.to(device) for a in args]
        body(*moved)
        results.append([c.cpu().contiguous().view(torch.int32) for c in moved[2:]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def random_round(seed: int, width: int) -> dict[str, Tensor]:
    """State of 6 rows of 40 tokens, some idle, some with drafts."""
    chance = generator(seed)

    def draw_ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=chance, dtype=torch.int32)

    known = draw_ints(1, 28, 7)
    computed = (known - draw_ints(0, width + 3, 7)).clamp(min=0)
    limit = (known + draw_ints(0, 9, 7)).clamp(max=39)
    tokens = draw_ints(0, 3, 7, 40)
    for column in (known, computed, limit, tokens):
        column[0] = 0
    stops = torch.full((7, 8), -1, dtype=torch.int32)
    stops[::2, 1] = 2
    return {
        "tokens": tokens,
        "known": known,
        "computed": computed,
        "drafts": draw_ints(0, 8, 7),
        "limit": limit,
        "stops": stops,
        "tables": draw_ints(1, 50, 2, 7, 10),
    }


@pytest.mark.parametrize("width", [1, 4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_the_round_s_own_kernels_do_what_their_specifications_do(seed: int, width: int) -> None:
    choices = width if width <= 8 else 1
    results = []
    for bodies, device in ((SPECIFICATIONS, "cpu"), (None, DEVICE)):

        def call(name: str, *args: Any, bodies: Any = bodies) -> Any:
            return (bodies[name] if bodies else IMPLEMENTATIONS[name, "cuda"])(*args)

        state = {k: v.to(device) for k, v in random_round(seed, width).items()}
        rows = ints(3, 1, 0, 6, 0).to(device)
        lens = (state["known"], state["computed"], state["drafts"], state["limit"])
        start, given, query_lens = call("open_round", *lens, rows, width, choices - 1)
        step = call(
            "open_step", state["tokens"], state["tables"], rows, start, query_lens, width, 1, (4, 7)
        )
        chance = generator(seed + 50)
        choice = torch.randint(-1, 3, (5, choices), generator=chance, dtype=torch.int32).to(device)
        seen = torch.randint(0, 3, (5, choices), generator=chance, dtype=torch.int32).to(device)
        outbox = torch.full((5, 7 + choices), -7, dtype=torch.int32, device=device)
        accept, live = call(
            "commit", state["tokens"], *lens, outbox, state["stops"], rows, start, given,
            query_lens, seen, choice,
        )  # fmt: skip
        place = start + accept + 1
        kept = call(
            "write_draft", state["tokens"], state["drafts"], state["limit"], rows, place, live,
            choice[:, 0],
        )  # fmt: skip
        every = (start, given, query_lens, *step, outbox, accept, live, kept, *state.values())
        results.append([t.cpu() for t in every])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("seed", range(4))
def test_an_inbox_is_applied_as_the_specification_applies_it(seed: int) -> None:
    rng, (batch, feed, writes) = random.Random(seed), (3, 5, 9)
    words = 12 + 8
    letter = torch.zeros(batch + batch * words + 2 * batch + batch * feed + 4 * writes).int()
    rows = rng.sample(range(1, 7), 2)
    letter[:2] = ints(*rows)
    fields = letter[batch : batch + batch * words].view(batch, words)
    fields[0] = torch.randint(-(2**31), 2**31, (words,), generator=generator(seed)).int()
    fields[0, [5, 7, 8]] = torch.tensor([0.7, 0.9, 0.1]).view(torch.int32)
    fields[:, 0] = ints(1, 0, 0)
    spans = letter[batch + batch * words :][: 2 * batch].view(batch, 2)
    spans[:2] = ints(3, 5, 7, 2).view(2, 2)
    at = batch + batch * words + 2 * batch
    letter[at : at + batch * feed] = torch.arange(1, batch * feed + 1).int()
    table = letter[at + batch * feed :].view(writes, 4)
    for index, (row, column) in enumerate([(rows[0], 0), (rows[0], 3), (rows[1], 2), (5, 9)]):
        table[index] = ints(row, index % 2, column, 40 + index)
    results = []
    for bodies, device in (("cpu", "cpu"), ("cuda", DEVICE)):
        state = {k: v.to(device) for k, v in random_round(seed, 4).items()}
        state["tables"][:, 0] = 0
        floats = [torch.full((7,), 0.5, device=device) for _ in range(3)]
        minimum, top_k = (torch.ones(7, dtype=torch.int32, device=device) for _ in range(2))
        seeds = torch.ones(7, dtype=torch.int64, device=device)
        uses = torch.ones(7, dtype=torch.int32, device=device)
        args = (
            letter.to(device), state["tokens"], state["known"], state["computed"], state["drafts"],
            state["limit"], minimum, state["tables"], *floats, top_k, seeds, uses, state["stops"],
        )  # fmt: skip
        body = SPECIFICATIONS["apply_inbox"]
        body = body if bodies == "cpu" else IMPLEMENTATIONS["apply_inbox", "cuda"]
        body(*args, words, batch, feed, writes)
        results.append([t.cpu() for t in args])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 5, 16, 17])
def test_experts_agree_with_shared_ones_beside_them(tokens: int, shared: int) -> None:
    """For few and for many tokens, with neighbours that overflow."""
    ids = torch.rand((1, tokens, 6), generator=generator(1)).argsort(-1)[..., :3].int()
    x, shares = draw(2, 1, tokens, 48), draw(3, 1, tokens, 3)
    both = (draw(6, 40 * shared, 48), draw(7, 48, 20 * shared)) if shared else ()
    args = (x, draw(4, 6, 40, 48), draw(5, 6, 48, 20), ids, shares, *both)
    check("grouped_experts", args, torch.float32)


@pytest.mark.parametrize("tokens", [0, 1, 90])
@pytest.mark.parametrize("first", [0, 4, 8])
def test_own_experts_agree_to_the_bit(first: int, tokens: int) -> None:
    """A choice of nobody stays one, and a weight of another rank's expert is not even read."""
    ids = torch.randint(-1, 12, (1, tokens, 6), generator=generator(1), dtype=torch.int32)
    shares = draw(3, 1, tokens, 6).masked_fill((ids < first) | (ids >= first + 4), float("nan"))
    body = IMPLEMENTATIONS["own_experts", "cuda"]
    for shares_of in (shares, shares.bfloat16()):
        found = body(*on_device((ids, shares_of, first, 4)))
        expected = SPECIFICATIONS["own_experts"](ids, shares_of, first, 4)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [4, 16, 40])
def test_a_choice_of_nobody_adds_nothing_and_reads_nothing(tokens: int, shared: bool) -> None:
    args = nobody_cases.arguments("grouped_experts", tokens, torch.float32, shared)
    given = on_device(tuple(nobody_cases.with_broken_first("grouped_experts", args)))
    found = IMPLEMENTATIONS["grouped_experts", "cuda"](*given)
    assert_near(found, nobody_cases.expected("grouped_experts", args).float(), torch.float32)


def test_few_experts_do_not_depend_on_what_neighbours_chose() -> None:
    ids = torch.rand((1, 9, 6), generator=generator(1)).argsort(-1)[..., :3].int()
    x, shares = draw(2, 1, 9, 48), draw(3, 1, 9, 3)
    weights = (draw(4, 6, 40, 48), draw(5, 6, 48, 20))
    body = IMPLEMENTATIONS["grouped_experts", "cuda"]
    together = body(*on_device((x, *weights, ids, shares)))
    for t in range(9):
        one = slice(t, t + 1)
        alone = body(*on_device((x[:, one], *weights, ids[:, one], shares[:, one])))
        assert torch.equal(together[:, one], alone)


@pytest.mark.parametrize("seed", range(6))
def test_lookup_finds_the_same_match(seed: int) -> None:
    """In rows over several parts, with endings that stand nowhere else, and in a row of one."""
    chance = generator(seed)
    tokens = torch.randint(0, 2 + 3 * seed, (5, 2500), generator=chance, dtype=torch.int32)
    tokens[1, 900:940] = tokens[1, 2300:2340]
    lens, rows = ints(0, 2340, 2500, 1, 700), ints(1, 2, 3, 4, 0)
    args = (tokens, lens, rows, 5, 4, 2)
    found = IMPLEMENTATIONS["lookup", "cuda"](*on_device(args))
    for one, other in zip(found, SPECIFICATIONS["lookup"](*args), strict=True):
        assert torch.equal(one.cpu(), other)
