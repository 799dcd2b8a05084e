# SPDX-License-Identifier: Apache-2.0
"""Index logits of rows that are not long against the specification, with the kernel for Hopper."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from tests.ops.cases import ints

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper card",
)


def case(heads: int, width: int, page: int) -> tuple[Any, ...]:
    """Rows of up to 1,280 keys, one of them short; what no query sees is not a number."""
    torch.manual_seed(width)
    columns = 1280 // page
    table = (torch.randperm(3 * columns) + 1).int().view(3, columns).cuda()
    rows = ints(2, 0, 1).cuda()
    ends = torch.tensor([1280 - width + 1, 70, 1000])
    lens = (ends[:, None] + torch.arange(width)).int().cuda()
    query = torch.randn(3, width, heads, 128, device="cuda").bfloat16()
    keys = torch.randn(3 * columns + 1, page, 128, device="cuda").bfloat16()
    for row, last in zip(rows.tolist(), lens[:, -1].tolist(), strict=True):
        for position in range(last, 1280):
            keys[table[row, position // page], position % page] = math.nan
    return query, torch.randn(3, width, heads, device="cuda"), keys, table, rows, lens


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 11])
@pytest.mark.parametrize("heads", [32, 64])
def test_index_logits_stay_within_their_error(heads: int, width: int, page: int) -> None:
    load_kernels("cuda")
    args = case(heads, width, page)
    module: Any = importlib.import_module("freewheel.ops.cuda.early_logits")
    assert module.serves(*args[:3])
    clean = args[2].nan_to_num(0)
    expected = SPECIFICATIONS["index_logits"](args[0], args[1].double(), clean, *args[3:])
    for skip in (0, 75):
        found = IMPLEMENTATIONS["index_logits", "cuda"](*args, skip)
        seen = expected.isfinite() & (args[5] > skip)[:, :, None]
        off = (found.double() - expected)[seen].abs().max()
        assert off <= 2e-5 * expected[seen].abs().max()
        if skip == 0:
            assert torch.equal(found.isneginf(), expected.isneginf())


def test_a_key_that_is_not_a_number_makes_its_logit_so() -> None:
    """And no other key's: ties and picks do not move."""
    load_kernels("cuda")
    query, gates, keys, table, rows, lens = case(64, 4, 64)
    before = IMPLEMENTATIONS["index_logits", "cuda"](query, gates, keys, table, rows, lens)
    keys[table[2, 3], 5] = math.nan
    after = IMPLEMENTATIONS["index_logits", "cuda"](query, gates, keys, table, rows, lens)
    position = 3 * 64 + 5
    assert after[0, :, position].isnan().all()
    assert torch.equal(after[:, :, :position], before[:, :, :position])
    assert torch.equal(after[0, :, position + 1 :], before[0, :, position + 1 :])
