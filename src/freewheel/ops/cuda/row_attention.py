# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA that reads a key once for all queries of a row, where these are several of few heads.

Queries that stand side by side pick much the same keys, and there are more of them than matrix
units can tell from one: four of 16 heads are as 64 heads of one. So each block lists what any of
them picked in its part of a row, with a bit for each query, and attends to that as by one query of
all their heads (`sources/attend_rows.cu`); a head's scores of what its query did not pick count
nothing.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from freewheel.ops.cuda.native import SHARED, Kernel, lacking
from freewheel.ops.cuda.runs import join, unjoined

KERNEL = Kernel("attend_rows", "ppppppppppfiiiiiiii", chip="a")

THREADS = 384

RANK, WIDTH, HEADS = 512, 576, 64
"""Values of a key, and all of it: what this kernel is written for; and heads of all queries of a
row together."""

MOST_WIDTH = 8
"""Queries of a row: a byte has a bit for each."""

FEWEST = 64
"""Queries in all from which it is faster: for fewer it waits for its list."""

TILE = 64
"""Keys that are multiplied together, and positions of a row that belong to one part together."""

TABLES, SPARE = 147_456, 2048
"""Bytes of shared memory for the tables that make a list, and for a list that stays there."""

BLOCKS = 132
"""That run at once on an H200: each has a multiprocessor to itself."""


class Row(NamedTuple):
    """Where queries' slots come from."""

    slots: Tensor  # int32 [B, W, K]
    page_table: Tensor  # int32 [R, P]
    rows: Tensor  # int32 [B]
    page_size: int


@cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def entries(columns: int) -> int:
    """Of the table of pages: a power of two, and where there is room one that is mostly empty."""
    return triton.next_power_of_2(columns * (8 if columns <= 1024 else 2))


def positions_of(own: Row, parts: int) -> int:
    """That a part has at most, in whole tiles."""
    tiles = triton.cdiv(own.page_table.shape[1] * own.page_size, TILE)
    return triton.cdiv(tiles, parts) * TILE


def room_of(own: Row, parts: int) -> int:
    """Slots of a part's list at most, in whole tiles."""
    picks = own.slots.shape[1] * own.slots.shape[2]
    return TILE * triton.cdiv(min(picks, positions_of(own, parts)), TILE)


def table_bytes(own: Row, parts: int) -> int:
    columns, picks = own.page_table.shape[1], own.slots.shape[1] * own.slots.shape[2]
    return 4 * (picks + 36 + 2 * entries(columns) + columns) + positions_of(own, parts)


def parts_for(own: Row) -> int:
    """Of a row, a power of two: with which the last block ends first.

    In tiles: a block costs about three of its own, and joining parts as much again.
    """
    batch, tiles = own.slots.shape[0], room_of(own, 1) // TILE

    def cost(parts: int) -> int:
        waves = triton.cdiv(batch * parts, BLOCKS)
        return waves * (triton.cdiv(tiles, parts) + 3) + (3 if parts > 1 else 0)

    return min((1, 2, 4, 8, 16, 32), key=cost)


def serves(query: Tensor, value_dim: int, own: Row) -> bool:
    """Whether this is for query [B, W, H, D] over plain rows."""
    batch, width, heads, dim = query.shape
    fits = query.is_cuda and query.dtype == torch.bfloat16 and (value_dim, dim) == (RANK, WIDTH)
    fits = fits and 2 <= width <= MOST_WIDTH and width * heads <= HEADS
    fits = fits and batch * width >= FEWEST and own.page_size % 4 == 0
    fits = fits and table_bytes(own, parts_for(own)) <= TABLES
    return fits and lacking() is None and _is_hopper(query.device.index)


def attend(query: Tensor, latent: Tensor, own: Row, out: Tensor, scale: float) -> None:
    """`sparse_mla` of query [B, W, H, D] into contiguous out [B, W, H, V]."""
    (batch, width, heads), k = query.shape[:3], own.slots.shape[2]
    parts, columns = parts_for(own), own.page_table.shape[1]
    room, flat = room_of(own, parts), out.flatten(1, 2)  # [B, W * H, V]
    rooms = unjoined(flat, parts)
    # A part's slots, and its marks, a byte each: one number stands for a list that stays inside.
    lists = own.slots.new_empty((batch * parts, room + room // 4) if 5 * room > SPARE else (1,))
    KERNEL.launch(
        batch * parts, THREADS, SHARED,
        query.contiguous(), latent, own.slots.contiguous(), own.page_table, own.rows, flat, *rooms,
        lists, scale * math.log2(math.e), width, k, heads, own.page_table.stride(0), columns,
        entries(columns), room, parts.bit_length() - 1,
        PAGE=own.page_size, WHOLE=int(parts == 1),
    )  # fmt: skip
    if parts > 1:
        join(*rooms, flat)
