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

KERNEL = Kernel("packed_experts", "pppppppppfi")

CHUNK = 128
"""Inputs that the four threads of a row read at a time."""

FEW = 8
"""Tokens up to which blocks find their pairs themselves."""

STEPS = 4
"""Steps of a warp, at least, before another one shares its inputs."""

Packed = tuple[Tensor, Tensor]
"""Codes and scales, of MXFP4 or FP8."""


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

    def constants(self) -> dict[str, int]:
        """Those of `KERNEL`."""
        return {name.upper(): value for name, value in self._asdict().items()}


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


DEPTH = 4
"""Steps whose weights are on their way, at most."""

WARPS = {2: 24, 4: 16, 8: 16}
"""Of a multiprocessor, by the tiles of a warp of one column: as many as its registers hold."""


def tile_of(inputs: int, tiles: int, columns: int, most: int) -> Tile:
    """For so many inputs, which at most `most` warps share."""
    chunks = inputs // CHUNK
    slices = max(
        n for n in range(1, most + 1) if chunks % n == 0 and (n == 1 or chunks // n >= STEPS)
    )
    warps = {1: WARPS[tiles], 2: 12, 4: 8}[columns]
    return Tile(tiles, columns, slices, min(tiles, DEPTH), max(1, warps // slices))


def takes(x: Tensor, width: int) -> bool:
    """Whether `packed_experts` computes experts of this width on x [..., H]."""
    if x.dtype != torch.bfloat16 or x.shape[-1] % CHUNK or width % CHUNK:
        return False
    return lacking() is None


def packed_experts(
    x: Tensor,
    gate_up: Packed,
    down: Packed,
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
    shared: tuple[Packed, Packed] | None,
    fixed: bool,
) -> Tensor:
    """`mxfp4_experts` of what it `takes`; x, ids and weights are contiguous and not empty.

    A shared expert in FP8, as bytes, is as wide as the others. `fixed`: by the tiles of one number
    of tokens, whatever theirs.
    """
    experts, hidden, width = down[0].shape[0], x.shape[-1], down[0].shape[2] * 2
    pairs, top_k, extra = ids.numel(), ids.shape[-1], int(shared is not None)
    tokens, few = pairs // top_k, pairs <= FEW * top_k and not fixed
    columns = 1 if fixed else columns_for(pairs, experts)
    up, low = tiles_for(hidden, width, columns, few)
    where, tiles = (ids, ids), pairs
    if not few:
        plan = list_tiles(ids, experts, 8 * columns)
        where, tiles = (plan.experts, plan.lanes), plan.experts.shape[0]
    tiles += extra * -(-tokens // (8 * columns))
    inner = x.new_empty((pairs + extra * tokens, width))
    parts = torch.empty((pairs + extra * tokens, hidden), dtype=torch.float32, device=x.device)
    first, second = (gate_up, down) if shared is None else shared
    rest, sizes = weights.to(torch.float32), {"TOP_K": top_k, "HIDDEN": hidden, "WIDTH": width}
    sizes |= {"FEW": int(few), "EXTRA": extra}
    KERNEL.launch(
        tiles * (width // (8 * up.tiles)), 32 * up.slices, up.shared,
        x, *gate_up, *first, *where, rest, inner, 0.0 if limit is None else limit, pairs,
        **sizes, **up.constants(), DOWN=0, CLAMP=int(limit is not None),
    )  # fmt: skip
    KERNEL.launch(
        tiles * (hidden // (16 * low.tiles)), 32 * low.slices, low.shared,
        inner, *down, *second, *where, rest, parts, 0.0, pairs,
        **sizes, **low.constants(), DOWN=1, CLAMP=0,
    )  # fmt: skip
    out = torch.empty_like(x)
    sum_choices(parts, ids, out, extra)
    return out
