# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer's scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from freewheel import ops
from freewheel.ops.cpu import attention as cpu_attention
from tests.ops.cases import (
    WIDE_DTYPES,
    Body,
    Pages,
    Sizes,
    arguments,
    assert_close,
    bodies,
    draw,
    draw_pages,
    ints,
    on_meta,
)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operator makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def naive(query, gates, keys, table, rows, kv_lens) -> Tensor:
    """One query, one head, one key at a time."""
    size = keys.shape[1]
    out = torch.full((*query.shape[:2], table.shape[1] * size), -math.inf, dtype=gates.dtype)
    for b, row in enumerate(rows.tolist()):
        for w, length in enumerate(kv_lens[b].tolist()):
            for t in range(length):
                key = keys[table[row, t // size], t % size]
                products = [max(0.0, float(q @ key)) for q in query[b, w]]
                out[b, w, t] = sum(
                    g * p for g, p in zip(gates[b, w].tolist(), products, strict=True)
                )
    return out


@bodies("index_logits")
def test_scores_are_gated_relus_of_products_summed_over_heads(body: Body) -> None:
    args = arguments("index_logits", Sizes(dtype=torch.float64))
    assert_close(body(*args), naive(*args))


@bodies("index_logits")
@pytest.mark.parametrize("lens", [[[7, 8, 9], [18, 19, 20]], [[6, 7, 8], [0, 0, 0]]])
def test_nothing_behind_a_row_is_followed(body: Body, lens: list[list[int]]) -> None:
    """Not page numbers past its length, not NaN keys in foreign pages, in scratch or past it."""
    query, gates, keys, table, rows, _ = arguments("index_logits")
    pages = Pages(table, rows, torch.tensor(lens, dtype=torch.int32), 4)
    clean = body(query, gates, keys, table, rows, pages.kv_lens)
    readable = torch.zeros(pages.count * 4, dtype=torch.bool)
    dirty_table = torch.full_like(table, 2**30)
    for b, row in enumerate(rows.tolist()):
        longest = max(lens[b])
        readable[pages.slots_of(b, torch.arange(longest))] = True
        columns = -(-longest // 4)
        dirty_table[row, :columns] = table[row, :columns]
    dirty_keys = torch.where(readable.view(-1, 4, 1), keys, math.nan)
    assert torch.equal(body(query, gates, dirty_keys, dirty_table, rows, pages.kv_lens), clean)


@bodies("index_logits")
@pytest.mark.parametrize("dtype", WIDE_DTYPES)
def test_paged_scores_equal_unpaged_scores_at_every_length(body: Body, dtype: torch.dtype) -> None:
    columns, size = 32, 4
    table = torch.randperm(columns).view(1, columns).int() + 1
    query, gates = draw(1, 1, 1, 2, 16, dtype=dtype), draw(2, 1, 1, 2, dtype=dtype)
    flat = draw(3, columns * size, 16, dtype=dtype)  # by position
    keys = torch.zeros(columns + 1, size, 16, dtype=dtype)
    keys[table[0].long()] = flat.view(columns, size, 16)
    unpaged = ((query[0, 0] @ flat.T).relu() * gates[0, 0, :, None]).sum(0)
    for length in range(1, columns * size + 1):
        logits = body(query, gates, keys, table, ints(0), ints(length)[None])[0, 0]
        assert_close(logits[:length], unpaged[:length])
        assert logits[length:].eq(-math.inf).all()


@pytest.mark.parametrize("keys", [4, 8, 64])
@pytest.mark.parametrize("queries", [1, 7, 96])
def test_scores_do_not_depend_on_how_the_cpu_body_cuts_them(
    monkeypatch: pytest.MonkeyPatch, keys: int, queries: int
) -> None:
    args = arguments("index_logits", Sizes(batch=2, width=96, dtype=torch.float64))
    whole = ops.index_logits(*args)
    monkeypatch.setattr(cpu_attention, "KEY_PIECE", keys)
    monkeypatch.setattr(cpu_attention, "QUERY_PIECE", queries)
    assert_close(ops.index_logits(*args), whole)


def test_the_specification_makes_no_tensor_that_grows_with_heads_and_width_and_length() -> None:
    """64 heads of 512 queries over 32768 keys: 67 MB of scores, not the 4.3 GB of every head."""
    width, heads, size = 512, 64, 64
    columns = 32768 // size
    args = (
        on_meta(1, width, heads, 128),
        on_meta(1, width, heads),
        on_meta(columns + 1, size, 128),
        on_meta(2, columns, dtype=torch.int32),
        on_meta(1, dtype=torch.int32),
        on_meta(1, width, dtype=torch.int32),
    )
    with Largest() as seen:
        result = ops.SPECIFICATIONS["index_logits"](*args)
    assert result.shape == (1, width, 32768)
    assert seen.numel == result.numel()


def test_the_cpu_body_holds_the_result_and_pieces_of_a_fixed_size() -> None:
    width, heads, size, columns = 96, 16, 16, 128
    pages = draw_pages(0, 1, width, columns, size)
    args = (
        draw(1, 1, width, heads, 8),
        draw(2, 1, width, heads),
        draw(3, pages.count, size, 8),
        pages.table,
        pages.rows,
        torch.full((1, width), columns * size, dtype=torch.int32),
    )
    with Largest() as seen:
        result = ops.IMPLEMENTATIONS["index_logits", "cpu"](*args)
    piece = cpu_attention.QUERY_PIECE * heads * cpu_attention.KEY_PIECE
    assert seen.numel <= max(result.numel(), piece) < width * heads * columns * size
