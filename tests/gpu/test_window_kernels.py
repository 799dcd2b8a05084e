# SPDX-License-Identifier: Apache-2.0
"""Attention over windows with many heads, on a card: against the specification, and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from tests.ops.window_cases import widened, window_call

HEADS = [33, 64, 100]
NAMES = {False: "window_attention", True: "fp8_window_attention"}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels("cuda")


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.cuda() if isinstance(a, Tensor) else a for a in args)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("queries", "heads", "lanes", "picks"),
    [(1, 64, 128, 512), (4, 33, 150, 200), (40, 64, 128, 512), (140, 100, 128, 33), (4, 64, 70, 0)],
)
def test_many_heads_agree_with_the_specification(
    queries: int, heads: int, lanes: int, picks: int, fixed: bool, packed: bool
) -> None:
    """Few queries are parted, many are not; rows that nobody lists are not numbers."""
    given, name = window_call(heads, lanes, picks, packed, queries), NAMES[packed]
    wanted = SPECIFICATIONS[name](*widened(on_device(given)))[0]
    found = IMPLEMENTATIONS[name, "cuda"](*on_device(given), fixed)[0].double()
    assert found.isfinite().all()
    off, size = (found - wanted).norm(dim=(1, 2)), wanted.norm(dim=(1, 2))
    assert (off <= 4e-3 * size).all()
    off = (found - wanted)[..., -64:].norm(dim=(1, 2))  # what turned back
    assert (off <= 4e-3 * wanted[..., -64:].norm(dim=(1, 2))).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_with_one_order_a_query_s_bits_are_the_same_in_any_company(
    heads: int, packed: bool
) -> None:
    given = on_device(window_call(heads, 128, 512, packed, 140))
    body = IMPLEMENTATIONS[NAMES[packed], "cuda"]
    query, keys, slots, entries, picks, sinks, scale, positions, table = given
    found = body(*given, True)
    for piece in (slice(0, 1), slice(7, 40), slice(3, 140)):
        lists = (keys, slots[:, piece], entries, picks[:, piece], sinks, scale)
        alone = body(query[:, piece], *lists, positions[:, piece], table, True)
        assert torch.equal(alone[0], found[0, piece])


def test_attention_that_turns_nothing_back_agrees_and_keeps_its_order() -> None:
    given = on_device(window_call(64, 128, 200, False, 140))[:7]
    wanted = SPECIFICATIONS["sink_attention"](*widened(given))
    body = IMPLEMENTATIONS["sink_attention", "cuda"]
    found = body(*given)
    assert (found.double() - wanted).norm() <= 4e-3 * wanted.norm()
    query, keys, slots, entries, picks, *rest = given
    own = (query[:, 5:7], keys, slots[:, 5:7], entries, picks[:, 5:7], *rest)
    assert torch.equal(body(*own), found[:, 5:7])
