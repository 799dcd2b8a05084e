# SPDX-License-Identifier: Apache-2.0
"""Runs of a query's lanes: how many there are, and how they are joined.

How many depends on the number of queries: few queries are split until the device is full, many are
not split at all, and then nothing is left to join. Where a sum must not depend on that, a run is
always as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow

FIXED, FIXED_MANY = 128, 512
"""Lanes of a run whose length must not depend on the number of queries; and of one of many heads,
whose runs leave more to be joined."""

ENOUGH = 264
"""Programs that keep an H200 busy: two a multiprocessor."""

SCRATCH = 1 << 24
"""Floats of unjoined runs held at once; wider rectangles go through in pieces of whole queries."""


Close = Callable[[Tensor, Tensor, Tensor, slice], None]
"""What takes runs that are not joined, as `unjoined` describes them, of a piece of the queries."""


@dataclass(frozen=True)
class Tile:
    """How a program works: heads and keys of its matrix tiles, columns of a piece, warps.

    `programs`: how many such run at once on an H200, which its shared memory decides.
    """

    heads: int
    step: int
    piece: int
    warps: int
    stages: int
    programs: int


@dataclass(frozen=True)
class Run:
    """Queries [N, H, D] with their slots int32 [N, K], in `parts` runs of `lanes` lanes.

    A single run of a query is written to out [N, H, V]. Several are left as sums of weighted values
    float32 [N, parts, H, V], highest scores and sums of weights, both float32 [N, parts, H].
    """

    query: Tensor  # float [N, H, D]
    slots: Tensor  # int32 [N, K]
    out: Tensor  # float [N, H, V]
    parts: int
    lanes: int
    mixed: Tensor  # float32 [N, parts, H, V]
    high: Tensor  # float32 [N, parts, H]
    total: Tensor  # float32 [N, parts, H]


@triton.jit
def _join_parts(
    part_in, high_in, total_in, out, parts, H,
    VALUE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    every = tl.arange(0, PARTS)
    cell = (n * parts + every) * H + h
    highs = tl.load(high_in + cell, mask=every < parts, other=float("-inf"))
    totals = tl.load(total_in + cell, mask=every < parts, other=0)
    full = (totals > 0) & (every < parts)  # else it may never have been written
    value = tl.load(
        part_in + cell[:, None] * VALUE + v[None, :],
        mask=full[:, None] & (v < VALUE)[None, :], other=0,
    )  # fmt: skip
    highest = tl.max(highs, 0)
    share = tl.exp(highs - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(totals * share, 0)
    mixed = tl.sum(value * share[:, None], 0)
    result = tl.where(total == 0, 0.0, mixed / total)
    tl.store(out + (n * H + h) * VALUE + v, result.to(out.dtype.element_ty), mask=v < VALUE)


def lanes_of_run(programs: int, lanes: int, tile: Tile) -> int:
    """Lanes of a run, where `programs` of them stand beside each other: whole tiles.

    The number of runs with which the last program ends first, in tiles. A run costs about two tiles
    of its own, and joining runs as much again.
    """
    tiles = triton.cdiv(lanes, tile.step)

    def cost(parts: int) -> int:
        waves = triton.cdiv(programs * parts, tile.programs)
        return waves * (triton.cdiv(tiles, parts) + 2) + (2 if parts > 1 else 0)

    parts = min(range(1, max(1, min(tiles, 32)) + 1), key=cost)
    return tile.step * max(1, triton.cdiv(tiles, parts))


def attend_by_runs(
    attend: Callable[..., None], given: tuple[Any, ...], query: Tensor, slots: Tensor, out: Tensor,
    tile: Tile, fixed: bool, close: Close | None = None,
) -> int:  # fmt: skip
    """`attend(run, tile, *given)` for runs of query [B, W, H, D] and slots [B, W, K], then joined.

    `out`: contiguous [B, W, H, V]. `close` joins what is left of a piece of the queries, if they
    have several runs; None: `join`, into `out`. Returns how many runs a query has.
    """
    queries, lanes = query.flatten(0, 1).contiguous(), slots.flatten(0, 1).contiguous()
    (count, heads), width, flat = queries.shape[:2], lanes.shape[1], out.flatten(0, 1)
    length = lanes_of_run(count * triton.cdiv(heads, tile.heads), width, tile)
    if fixed:
        length = FIXED if tile.heads <= 16 else FIXED_MANY
    parts = triton.cdiv(width, length)
    step = max(1, count) if parts == 1 else max(1, SCRATCH // (parts * heads * flat.shape[2]))
    for at in range(0, count, step):
        piece = slice(at, at + step)
        rooms = unjoined(flat[piece], parts)
        attend(Run(queries[piece], lanes[piece], flat[piece], parts, length, *rooms), tile, *given)
        if parts > 1 and close is None:
            join(*rooms, flat[piece])
        elif close is not None and parts > 1:
            close(*rooms, piece)
    return parts


def unjoined(out: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where runs go: a single one needs no room."""
    if parts == 1:
        return out, out, out
    (count, heads, value), device = out.shape, out.device
    mixed = torch.empty((count, parts, heads, value), dtype=torch.float32, device=device)
    high, total = torch.empty((2, count, parts, heads), dtype=torch.float32, device=device)
    return mixed, high, total


def piece_of(value: int, rows: int) -> int:
    """Values of a program that joins runs: few where rows are few, so that many load at once."""
    most = 256 if rows * triton.cdiv(value, 256) >= ENOUGH else 64
    return min(most, max(16, triton.next_power_of_2(value)))


def join(mixed: Tensor, high: Tensor, total: Tensor, out: Tensor) -> None:
    count, parts, heads, value = mixed.shape
    piece = piece_of(value, count * heads)
    _join_parts[(count, heads, triton.cdiv(value, piece))](
        mixed, high, total, out, parts, heads,
        VALUE=value, PARTS=triton.next_power_of_2(parts), BLOCK=piece, CHAINED=CHAINED,
        num_warps=2, launch_pdl=CHAINED,
    )  # fmt: skip
