# SPDX-License-Identifier: Apache-2.0
"""Repacked MXFP4 experts in CUDA C++: `sources/repacked_experts.cu`, and tiles of more tokens.

Up to eight tokens, each (token, choice) pair has the blocks of an expert, and finds by itself who
else chose it; pairs that an earlier one's blocks compute have blocks that end at once
(`sources/repacked_tiles.cu`). More tokens are listed first, as those of FP8 experts are. Where
experts have a few each, a block a multiprocessor stays for all of them; where they have more, what
is unpacked meets 16 or 32 of them, by tiles again.

Error: weights are exact, products are summed in float32; what lies between the two projections is
rounded once to bfloat16, and so is the sum over experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freewheel.ops.cuda.block_experts import as_bytes, run_shared
from freewheel.ops.cuda.native import SHARED, Kernel, lacking
from freewheel.ops.cuda.quantised_experts import list_tiles, sum_choices
from freewheel.ops.registry import SPECIFICATIONS, implement
from freewheel.ops.repacking import INPUTS, PIECE, ROWS

FEW = 8
"""Tokens up to which blocks find their pairs themselves."""

STEPS = 4
"""Steps of a warp of tiles, at least, before another one shares its inputs."""

WARPS = 16
"""Of a block that stays, at most."""

EACH = (2, 3, 4, 1)
"""Pieces of a tile that a warp may take, in the order of preference."""

Packed = tuple[Tensor, Tensor]
"""Codes and scales of a shared expert, of FP8 as bytes."""


class Ring(NamedTuple):
    """Of a block that stays: warps, how many share a tile's inputs, what is under way at once."""

    warps: int
    slices: int
    stages: int
    buffers: int
    sides: int

    @property
    def threads(self) -> int:
        """Of a block: where slices are added up, two warps more do that."""
        return 32 * (self.warps + (2 if self.slices > 1 else 0))

    def shared(self, inputs: int) -> int:
        """Bytes of shared memory: stages, sums of slices, and barriers."""
        sums = self.buffers * self.warps * 512 if self.slices > 1 else 0
        ring = self.stages * self.warps * stage_bytes(inputs // INPUTS // self.slices)
        return ring + sums + 16 * self.buffers + 16

    def constants(self) -> dict[str, int]:
        """Those of `STAYING`."""
        return {name.upper(): value for name, value in self._asdict().items()}


def stage_bytes(each: int) -> int:
    """Of so many pieces, or of a chunk of a shared tile, at a multiple of 128."""
    return -(-max(each * PIECE, 2048) // 128) * 128


def ring_for(inputs: int) -> Ring | None:
    """For so many inputs; None if no number of warps can share them."""
    chunks = inputs // INPUTS
    for each in EACH:
        slices = chunks // each
        if chunks % each or slices > WARPS:
            continue
        warps = WARPS // slices * slices
        for stages in (3, 2):
            ring = Ring(warps, slices, stages, 8, 2 if slices == 1 and each < 3 else 1)
            if ring.shared(inputs) <= SHARED:
                return ring
    return None


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
        """Those of `TILES`."""
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
    behind = {1: 8, 2: 4, 4: 2}[columns]
    return tile_of(hidden, 2, columns, 4), tile_of(width, behind, columns, 4)


DEPTH = 4
"""Steps whose weights are on their way, at most."""


def tile_of(inputs: int, tiles: int, columns: int, most: int) -> Tile:
    """For so many inputs, which at most `most` warps share."""
    chunks = inputs // INPUTS
    slices = max(
        n for n in range(1, most + 1) if chunks % n == 0 and (n == 1 or chunks // n >= STEPS)
    )
    warps = {1: 24 if tiles == 2 else 16, 2: 12, 4: 8}[columns]
    return Tile(tiles, columns, slices, min(tiles, DEPTH), max(1, warps // slices))


STAYING = Kernel("repacked_experts", "ppppppppfiii")
TILES = Kernel("repacked_tiles", "ppppppppfi")


class Call(NamedTuple):
    """What both projections are told: a routing, and constants of the experts."""

    where: tuple[Tensor, Tensor]  # int32 [most], int32 [most * tokens]; of few: choices, twice
    shares: Tensor  # float32 [pairs]
    pairs: int
    most: int  # entries of the list
    constants: dict[str, int]


@implement("repacked_experts", "cuda")
def repacked_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    fixed: bool = False,
) -> Tensor:
    shared = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    if x.dtype != torch.bfloat16 or lacking() is not None:
        given = (x, gate_up, down, ids, weights, limit)
        return SPECIFICATIONS["repacked_experts"](*given, *shared, fixed)
    if not x.numel():
        return torch.empty_like(x)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    behind = as_bytes(*shared)
    if behind is None or behind.down.shape[1] != gate_up.shape[1] * ROWS // 2:
        out = run_pieces(x, (gate_up, down), ids, weights, limit, None, fixed)
        return out if behind is None else out + run_shared(x, behind, limit, fixed)
    both = (behind.gate_up, behind.gate_up_scale), (behind.down, behind.down_scale)
    return run_pieces(x, (gate_up, down), ids, weights, limit, both, fixed)


def run_pieces(
    x: Tensor,
    own: tuple[Tensor, Tensor],
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
    shared: tuple[Packed, Packed] | None,
    fixed: bool,
) -> Tensor:
    """`repacked_experts` of contiguous bfloat16 x, not empty; a shared expert is as wide."""
    experts, hidden, width = own[0].shape[0], x.shape[-1], own[0].shape[1] * ROWS // 2
    pairs, top_k, extra = ids.numel(), ids.shape[-1], int(shared is not None)
    tokens, columns = pairs // top_k, 1 if fixed else columns_for(pairs, experts)
    rings = ring_for(hidden), ring_for(width)
    few = tokens <= FEW and not fixed
    staying = not few and columns == 1 and None not in rings
    where, most = (ids, ids), 0
    if not few:
        plan = list_tiles(ids, experts, 8 * columns)
        where, most = (plan.experts, plan.lanes), plan.experts.shape[0]
    inner = x.new_empty((pairs + extra * tokens, width))
    parts = torch.empty((pairs + extra * tokens, hidden), dtype=torch.float32, device=x.device)
    sizes = {"TOP_K": top_k, "HIDDEN": hidden, "WIDTH": width, "EXTRA": extra}
    call = Call(where, weights.to(torch.float32), pairs, most, sizes)
    first, second = ((w, w) for w in own) if shared is None else shared
    given = (x, own[0], *first, inner), (inner, own[1], *second, parts)
    if staying:
        for down, ring in enumerate(rings):
            if ring is not None:
                _launch_ring(call, ring, given[down], limit, bool(down))
    else:
        for down, tile in enumerate(tiles_for(hidden, width, columns, few)):
            _launch_tiles(call, tile, given[down], limit, few, bool(down))
    out = torch.empty_like(x)
    sum_choices(parts, ids, out, extra)
    return out


def _launch_ring(
    call: Call, ring: Ring, given: tuple[Tensor, ...], limit: float | None, down: bool
) -> None:
    """A projection of (x, pieces, shared codes, shared scales, out) by blocks that stay."""
    *inputs, out = given
    blocks = torch.cuda.get_device_properties(out.device).multi_processor_count
    size = call.constants["WIDTH" if down else "HIDDEN"]
    STAYING.launch(
        blocks, ring.threads, ring.shared(size),
        *inputs, *call.where, call.shares, out, 0.0 if limit is None else limit, call.pairs,
        call.most, blocks, **call.constants, **ring.constants(), DOWN=int(down),
        CLAMP=int(limit is not None and not down),
    )  # fmt: skip


def _launch_tiles(
    call: Call, tile: Tile, given: tuple[Tensor, ...], limit: float | None, few: bool, down: bool
) -> None:
    """As `_launch_ring`, a block for each listed tile and some of its outputs."""
    *inputs, out = given
    tokens = call.pairs // call.constants["TOP_K"]
    shared = call.constants["EXTRA"] * -(-tokens // (8 * tile.columns))
    entries = shared + (call.pairs if few else call.most)
    parts = out.shape[1] // ((16 if down else 8) * tile.tiles)
    TILES.launch(
        entries * parts, 32 * tile.slices, tile.shared,
        *inputs, *call.where, call.shares, out, 0.0 if limit is None else limit, call.pairs,
        **call.constants, **tile.constants(), DOWN=int(down), FEW=int(few),
        CLAMP=int(limit is not None and not down),
    )  # fmt: skip
