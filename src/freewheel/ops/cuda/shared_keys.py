# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA that reads a key once for all queries of a row, where these are several of few heads.

Queries that stand side by side pick much the same keys, and there are more of them than matrix
units can tell from one: four of 16 heads are as 64 heads of one. So the slots that any of them
picked are listed once, with a bit for each query (`sources/union_slots.cu`), and attended to as by
one query of all their heads; a head's scores of what its query did not pick count nothing.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from freewheel.ops.cuda import many_heads
from freewheel.ops.cuda.native import SHARED, Kernel, lacking
from freewheel.ops.cuda.runs import SCRATCH, Run, join, lanes_of_run, unjoined

KERNEL = Kernel("union_slots", "ppppppiiiiii")

THREADS = 1024

MOST_WIDTH = 8
"""Queries of a row: a byte has a bit for each."""

FEWEST = 64
"""Queries in all from which it is faster: for fewer it waits for the list."""


class Row(NamedTuple):
    """Where queries' slots come from."""

    slots: Tensor  # int32 [B, W, K]
    page_table: Tensor  # int32 [R, P]
    rows: Tensor  # int32 [B]
    page_size: int


@cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _entries(columns: int) -> int:
    """Of the table of pages: a power of two."""
    return triton.next_power_of_2(columns + columns // 4)


def _bytes(columns: int, page_size: int) -> int:
    return 4 * (32 + 2 * _entries(columns) + columns) + columns * page_size


def serves(query: Tensor, value_dim: int, own: Row) -> bool:
    """Whether this is for query [B, W, H, D]."""
    batch, width, heads, dim = query.shape
    fits = query.is_cuda and query.dtype == torch.bfloat16
    fits = fits and (value_dim, dim) == (many_heads.RANK, many_heads.RANK + many_heads.ROPE)
    fits = fits and 2 <= width <= MOST_WIDTH and width * heads <= many_heads.TILE.heads
    fits = fits and batch * width >= FEWEST and own.page_size % 4 == 0
    fits = fits and _bytes(own.page_table.shape[1], own.page_size) <= SHARED
    return fits and lacking() is None and _is_hopper(query.device.index)


def union(own: Row) -> tuple[Tensor, Tensor, Tensor]:
    """(slots int32 [B, U], -1 padded; queries that picked them, by bits; how many there are [B]).

    Slots by the order of the row's pages. U: as many as there can be.
    """
    (batch, width, k), columns = own.slots.shape, own.page_table.shape[1]
    room = min(width * k, columns * own.page_size)
    lanes, marks = own.slots.new_empty((2, batch, room))
    counts = own.slots.new_empty((batch,))
    KERNEL.launch(
        batch, THREADS, _bytes(columns, own.page_size),
        own.slots.contiguous(), own.page_table, own.rows, lanes, marks, counts, width, k,
        own.page_table.stride(0), columns, _entries(columns), room,
        THREADS=THREADS, PAGE=own.page_size,
    )  # fmt: skip
    return lanes, marks, counts


def attend(query: Tensor, latent: Tensor, own: Row, out: Tensor, scale: float) -> None:
    """`sparse_mla` of query [B, W, H, D] into contiguous out [B, W, H, V]."""
    lanes, marks, counts = union(own)
    heads = query.shape[2]
    queries, flat = query.flatten(1, 2).contiguous(), out.flatten(1, 2)  # [B, W * H, ..]
    (count, rows), value = queries.shape[:2], flat.shape[2]
    length = lanes_of_run(count, lanes.shape[1], many_heads.TILE)
    parts = triton.cdiv(lanes.shape[1], length)
    step = max(1, SCRATCH // (parts * rows * value))
    for at in range(0, count, step):
        piece = slice(at, at + step)
        rooms = unjoined(flat[piece], parts)
        run = Run(queries[piece], lanes[piece], flat[piece], parts, length, *rooms)
        who = many_heads.Marks(heads, marks[piece], counts[piece])
        many_heads.attend(run, many_heads.TILE, many_heads.plain_rows(latent), scale, who)
        if parts > 1:
            join(*rooms, flat[piece])
