# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts in CUDA C++, in three launches or four: `sources/packed_experts.cu`.

Up to eight tokens, each (token, choice) pair has the blocks of an expert, and finds by itself who
else chose it; pairs that an earlier one's blocks compute have blocks that end at once. More tokens
are listed first, as those of FP8 experts are.

Error: weights are exact, products are summed in float32; what lies between the two projections is
rounded once to bfloat16, and so is the sum over experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freewheel.ops.cuda.native import Kernel, lacking
from freewheel.ops.cuda.quantised_experts import list_tiles, sum_choices

KERNEL = Kernel("packed_experts", "pppppppfi")

CHUNK = 128
"""Inputs that the four threads of a row read at a time."""

FEW = 8
"""Tokens up to which blocks find their pairs themselves."""

STEPS = 4
"""Steps of a warp, at least, before another one shares its inputs."""


DEPTH = 4
"""Steps whose weights are on their way, at most."""

WARPS = {2: 24, 4: 16, 8: 16}
"""Of a multiprocessor, by the tiles of a warp of one column: as many as its registers hold."""


class Tile(NamedTuple):
    """Of one block: 16 rows a tile, 8 tokens a column, a warp a slice of the inputs."""

    tiles: int
    columns: int
    slices: int
    depth: int
    blocks: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the tokens, and every warp's sums."""
        return 32 * self.columns + self.slices * self.tiles * self.columns * 512


def columns_for(pairs: int, experts: int) -> int:
    """By how many pairs an expert has when they spread evenly."""
    if pairs <= 4 * experts:
        return 1
    return 2 if pairs <= 16 * experts else 4


def tiles_for(hidden: int, width: int, columns: int, few: bool) -> tuple[Tile, Tile]:
    """Of gates and ups, and of the projection behind them; measured at 4, 32 and 128 tokens."""
    if few:
        return tile_of(hidden, 2, 1, 8), tile_of(width, 4, 1, 4)
    tiles = {1: 8, 2: 4, 4: 2}[columns]
    return tile_of(hidden, 2, columns, 4), tile_of(width, tiles, columns, 4)


def tile_of(inputs: int, tiles: int, columns: int, most: int) -> Tile:
    """For so many inputs, which at most `most` warps share."""
    chunks = inputs // CHUNK
    slices = max(
        n for n in range(1, most + 1) if chunks % n == 0 and (n == 1 or chunks // n >= STEPS)
    )
    warps = WARPS[tiles] if columns == 1 else 16 if columns == 2 else 12
    return Tile(tiles, columns, slices, min(tiles, DEPTH), max(1, warps // slices))


def takes(x: Tensor, width: int) -> bool:
    """Whether `packed_experts` computes experts of this width on x [..., H]."""
    if x.dtype != torch.bfloat16 or x.shape[-1] % CHUNK or width % CHUNK:
        return False
    return lacking() is None


def packed_experts(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
) -> Tensor:
    """`mxfp4_experts` of what it `takes`; x, ids and weights are contiguous and not empty."""
    experts, hidden, width = down[0].shape[0], x.shape[-1], down[0].shape[2] * 2
    pairs, top_k = ids.numel(), ids.shape[-1]
    few, columns = pairs <= FEW * top_k, columns_for(pairs, experts)
    up, low = tiles_for(hidden, width, columns, few)
    where, tiles = (ids, ids), pairs
    if not few:
        plan = list_tiles(ids, experts, 8 * columns)
        where, tiles = (plan.experts, plan.lanes), plan.experts.shape[0]
    inner = x.new_empty((pairs, width))
    parts = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
    shares = weights.to(torch.float32)
    sizes = {"TOP_K": top_k, "HIDDEN": hidden, "WIDTH": width, "FEW": int(few), "CHUNKS": 1}
    given = (*where, shares), (0.0 if limit is None else limit, pairs)
    KERNEL.launch(
        tiles * (width // (8 * up.tiles)), 32 * up.slices, up.shared,
        x, *gate_up, *given[0], inner, *given[1],
        **sizes, **constants_of(up), DOWN=0, CLAMP=int(limit is not None),
    )  # fmt: skip
    KERNEL.launch(
        tiles * (hidden // (16 * low.tiles)), 32 * low.slices, low.shared,
        inner, *down, *given[0], parts, *given[1],
        **sizes, **constants_of(low), DOWN=1, CLAMP=0,
    )  # fmt: skip
    out = torch.empty_like(x)
    sum_choices(parts, out, top_k)
    return out


def constants_of(tile: Tile) -> dict[str, int]:
    return {
        "TILES": tile.tiles, "COLUMNS": tile.columns, "SLICES": tile.slices,
        "DEPTH": tile.depth, "BLOCKS": tile.blocks,
    }  # fmt: skip
