# SPDX-License-Identifier: Apache-2.0
"""Attention over listed slots."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from freewheel import ops
from freewheel.ops import attention
from freewheel.ops.cpu import attention as cpu_attention
from tests.ops.cases import (
    WIDE_DTYPES,
    Body,
    Sizes,
    arguments,
    assert_close,
    bodies,
    draw,
    ints,
    on_meta,
)
from tests.ops.test_index_logits import Largest

NAME = "sparse_mla"
SCALE, VALUE = 0.3, 16


def naive(query: Tensor, flat: Tensor, slots: list[int]) -> Tensor:
    """query [H, D] over the live `slots` of flat [n_slots, D]; zeros without any."""
    keys = flat[[slot for slot in slots if slot >= 0]]
    if not len(keys):
        return torch.zeros(query.shape[0], VALUE, dtype=query.dtype)
    return (query @ keys.T * SCALE).softmax(-1) @ keys[:, :VALUE]


def attend(body: Body, query: Tensor, latent: Tensor, slots: list[int]) -> Tensor:
    """query [H, D] -> [H, VALUE]"""
    return body(query[None, None], latent, ints(*slots)[None, None], SCALE, VALUE)[0, 0]


@bodies(NAME)
@pytest.mark.parametrize("dtype", WIDE_DTYPES)
@pytest.mark.parametrize(
    "slots",
    [
        [-1] * 16 + [5, 9],
        [5, 9] + [-1] * 16,
        [-1, 5, -1, -1, 9, -1],
        [0, 3, 39],
        [7],
        [-1],
        [-1] * 32,
        [-(2**31), 5],
    ],
)
def test_attention_is_a_softmax_over_the_live_lanes(
    body: Body, dtype: torch.dtype, slots: list[int]
) -> None:
    query, latent = draw(1, 4, 24, dtype=dtype), draw(2, 10, 4, 24, dtype=dtype)
    assert_close(attend(body, query, latent, slots), naive(query, latent.view(-1, 24), slots))


@bodies(NAME)
def test_a_query_without_a_key_gives_zeros_even_if_it_is_nan(body: Body) -> None:
    latent = torch.full((10, 4, 24), math.nan)
    for query in (draw(1, 4, 24), torch.full((4, 24), math.nan)):
        assert torch.equal(attend(body, query, latent, [-1] * 8), torch.zeros(4, VALUE))


@bodies(NAME)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_no_lane_names_is_not_read(body: Body, poison: float) -> None:
    """Scratch page 0 above all, to which a dead lane could be clamped."""
    query, latent, slots, *rest = arguments(NAME)
    live = torch.zeros(latent.shape[0] * 4, dtype=torch.bool)
    live[slots[slots >= 0].long()] = True
    assert not live[:4].any()
    dirty = torch.where(live.view(-1, 4, 1), latent, poison)
    assert torch.equal(body(query, dirty, slots, *rest), body(query, latent, slots, *rest))


@bodies(NAME)
def test_large_scores_do_not_overflow(body: Body) -> None:
    query, latent = draw(1, 4, 24).mul(1e4), draw(2, 10, 4, 24).mul(1e4)
    flat, slots = latent.view(-1, 24), [3, 8, 12, -1]
    best = (query @ flat[slots[:3]].T).argmax(-1)
    expected = flat[torch.tensor(slots)[best]][:, :VALUE]
    assert_close(attend(body, query, latent, slots), expected)


@bodies(NAME)
def test_the_order_of_lanes_does_not_matter(body: Body) -> None:
    query, latent = draw(1, 4, 24, dtype=torch.float64), draw(2, 10, 4, 24, dtype=torch.float64)
    one = attend(body, query, latent, [3, 8, 12, -1, 30])
    assert_close(attend(body, query, latent, [-1, 30, 12, 3, 8]), one)


@bodies(NAME)
def test_heads_share_one_key(body: Body) -> None:
    query, latent, slots, *rest = arguments(NAME, Sizes(dtype=torch.float64))
    together = body(query, latent, slots, *rest)
    for head in range(query.shape[2]):
        alone = body(query[:, :, head : head + 1], latent, slots, *rest)
        assert_close(alone[:, :, 0], together[:, :, head])


@pytest.mark.parametrize(
    ("module", "limit"), [(attention, "GATHER_LIMIT"), (cpu_attention, "GATHER_PIECE")]
)
@pytest.mark.parametrize("pieces", [1, 7, 96])
def test_attention_does_not_depend_on_how_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, module: object, limit: str, pieces: int
) -> None:
    args = arguments(NAME, Sizes(batch=1, width=96, dtype=torch.float64))
    served = ops.SPECIFICATIONS[NAME] if module is attention else ops.sparse_mla
    whole = served(*args)
    monkeypatch.setattr(module, limit, pieces * 7 * 24)
    with Largest() as seen:
        cut = (
            ops.SPECIFICATIONS[NAME](*args)
            if module is attention
            else ops.IMPLEMENTATIONS[NAME, "cpu"](*args)
        )
    assert_close(cut, whole)
    assert seen.numel <= max(pieces * 7 * 24, args[0].numel())


def test_the_specification_gathers_a_bounded_number_of_keys() -> None:
    """1024 queries of 2048 keys of 576: 67 MB at a time instead of 4.8 GB."""
    query, latent = on_meta(1, 1024, 16, 576), on_meta(600, 64, 576)
    slots = on_meta(1, 1024, 2048, dtype=torch.int32)
    with Largest() as seen:
        result = ops.SPECIFICATIONS[NAME](query, latent, slots, 0.1, 512)
    assert result.shape == (1, 1024, 16, 512)
    assert seen.numel <= max(attention.GATHER_LIMIT, latent.numel())


def test_a_call_that_names_the_rows_has_the_shape_of_one_that_does_not() -> None:
    query, latent = torch.zeros(2, 3, 4, 24), torch.zeros(5, 8, 24)
    slots = torch.zeros(2, 3, 6, dtype=torch.int32)
    table, rows = torch.zeros(2, 4, dtype=torch.int32), slots[:, 0, 0]
    args = (query, latent, slots, table, rows)
    shapes = []
    for q, keys, own, pages, which in (args, tuple(a.to("meta") for a in args)):
        found = ops.sparse_mla(q, keys, own, 1.0, 16, page_table=pages, rows=which)
        shapes.append(tuple(found.shape))
    assert shapes == [(2, 3, 4, 16)] * 2
