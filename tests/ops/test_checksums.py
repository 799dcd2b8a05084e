# SPDX-License-Identifier: Apache-2.0
"""Checksums of pages and tokens: exact, of a row's own words, and changed by any one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel import ops
from freewheel.graph import no_host_sync
from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS
from tests.ops.cases import bodies, generator

ROWS = {
    "float64": (torch.float64, [6]),
    "bfloat16": (torch.bfloat16, [8]),
    "index": (torch.uint8, [128, 4]),
    "key": (torch.uint8, [576, 8]),
}
EVERY_ROW = pytest.mark.parametrize("kind", sorted(ROWS))
Args = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[int], int]


def case(kind: str, seed: int = 0) -> Args:
    """Pages of any bits, NaN among them; whole pages, parts of pages, and nothing."""
    dtype, parts = ROWS[kind]
    rng = generator(seed)
    size = sum(parts) * torch.empty(0, dtype=dtype).element_size()
    stored = torch.randint(0, 256, (3, 9, 4, size), dtype=torch.uint8, generator=rng).view(dtype)
    shape = (3, 5)
    pages = torch.randint(0, 9, shape, dtype=torch.int32, generator=rng)
    begins = torch.randint(0, 4, shape, dtype=torch.int32, generator=rng)
    begins = begins * torch.randint(0, 2, shape, dtype=torch.int32, generator=rng)
    ends = torch.randint(0, 5, shape, dtype=torch.int32, generator=rng)
    return stored, pages, begins, ends, torch.full(shape, 7, dtype=torch.int64), parts, 2


def summed(body: Callable[..., Any], args: Args, **changed: Tensor) -> Tensor:
    """int64 [B, C]: what the op added, beginning with 0."""
    stored, pages, begins, ends, _, parts, label = args
    sums = torch.zeros(pages.shape, dtype=torch.int64)
    stored, begins, ends = (
        changed.get(name, value)
        for name, value in {"stored": stored, "begins": begins, "ends": ends}.items()
    )
    body(stored, pages, begins, ends, sums, parts, label)
    return sums


@EVERY_ROW
@pytest.mark.parametrize("seed", range(5))
def test_the_cpu_body_gives_the_sums_of_the_specification(kind: str, seed: int) -> None:
    args = case(kind, seed)
    wanted = summed(SPECIFICATIONS["sum_pages"], args)
    assert torch.equal(summed(IMPLEMENTATIONS["sum_pages", "cpu"], args), wanted)
    ops.sum_pages(*args)
    assert torch.equal(args[4], wanted + 7)


@bodies("sum_pages")
@EVERY_ROW
def test_any_bit_of_a_row_changes_the_sums_of_that_row_alone(
    kind: str, body: Callable[..., Any]
) -> None:
    args = case(kind)
    stored, pages, _, _, _, parts, _ = args
    begins, ends = torch.full_like(pages, 1), torch.full_like(pages, 3)
    before = summed(body, args, begins=begins, ends=ends)
    words = stored.flatten(2).view(torch.int32)
    owner = torch.cat(
        [torch.arange(4 * part * stored.element_size() // 4) // (part * stored.element_size() // 4)
         for part in parts]
    )  # fmt: skip
    for bit in range(0, 32 * words.shape[2], 37):
        place, layer = bit // 32, bit % 3
        flipped = stored.clone()
        page = int(pages[0, 0])
        flipped.flatten(2).view(torch.int32)[layer, page, place] ^= -(1 << 31) >> bit % 32
        after = summed(body, args, stored=flipped, begins=begins, ends=ends)
        inside = 1 <= int(owner[place]) < 3
        assert torch.equal(after != before, (pages == page) & inside)


@EVERY_ROW
def test_sums_of_parts_add_up_to_the_sum_of_the_whole(kind: str) -> None:
    args = case(kind)
    zero, last = torch.zeros_like(args[1]), torch.full_like(args[1], 4)
    middle = args[3]
    first = summed(ops.sum_pages, args, begins=zero, ends=middle)
    second = summed(ops.sum_pages, args, begins=middle, ends=last)
    assert torch.equal(first + second, summed(ops.sum_pages, args, begins=zero, ends=last))


def test_words_that_change_places_change_the_sum() -> None:
    args = case("bfloat16")
    swapped = args[0].flip(0)
    whole = {"begins": torch.zeros_like(args[1]), "ends": torch.full_like(args[1], 4)}
    assert (summed(ops.sum_pages, args, stored=swapped, **whole) != summed(
        ops.sum_pages, args, **whole)).all()  # fmt: skip


def test_tokens_are_summed_up_to_where_they_are_certain() -> None:
    tokens = torch.randint(0, 99, (4, 12), dtype=torch.int32, generator=generator(1))
    rows = torch.tensor([3, 1], dtype=torch.int32)
    begins, ends = torch.tensor([0, 2]).int(), torch.tensor([5, 9]).int()
    before = ops.sum_tokens(tokens, rows, begins, ends)
    for row in range(4):
        for place in range(12):
            changed = tokens.clone()
            changed[row, place] += 1
            after = ops.sum_tokens(changed, rows, begins, ends)
            wanted = [row == 3 and place < 5, row == 1 and 2 <= place < 9]
            assert (after != before).tolist() == wanted
    halves = ops.sum_tokens(tokens, rows, begins, begins + 2) + ops.sum_tokens(
        tokens, rows, begins + 2, ends
    )
    assert torch.equal(halves, before)


def test_a_token_of_zero_counts() -> None:
    rows, begins = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tokens = torch.zeros(1, 4, dtype=torch.int32)
    sums = [int(ops.sum_tokens(tokens, rows, begins, begins + n)) for n in range(5)]
    assert len(set(sums)) == 5


@EVERY_ROW
def test_schemas_and_fakes_describe_the_ops(kind: str) -> None:
    checks = ["test_schema", "test_faketensor"]
    torch.library.opcheck(torch.ops.freewheel.sum_pages.default, case(kind), test_utils=checks)
    rows = torch.zeros(2, dtype=torch.int32)
    tokens = torch.zeros(1, 4, dtype=torch.int32)
    args = (tokens, rows, rows, rows + 2)
    torch.library.opcheck(torch.ops.freewheel.sum_tokens.default, args, test_utils=checks)


@EVERY_ROW
def test_the_specifications_read_nothing_on_the_host(kind: str) -> None:
    args = case(kind)
    with no_host_sync():
        SPECIFICATIONS["sum_pages"](*args)
