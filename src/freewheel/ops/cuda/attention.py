# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA: a program attends to a run of a query's lanes, another joins the runs if there are
several.

A tile of keys is loaded in pieces of columns, each multiplied by itself: a thread then holds few
addresses, and so little else that two programs share a multiprocessor, one of which waits for its
keys while the other multiplies.

How many runs there are depends on the number of queries: few queries are split until the device is
full, many are not split at all, and then nothing is left to join. With `fixed` a run is always
`FIXED` lanes, so the order of a sum depends on the number of lanes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.registry import SPECIFICATIONS, implement

FIXED = 128
"""Lanes of a run whose length must not depend on the number of queries."""

SCRATCH = 1 << 24
"""Floats of unjoined runs held at once; wider rectangles go through in pieces of whole queries."""


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


FEW_HEADS = Tile(heads=16, step=64, piece=128, warps=4, stages=2, programs=264)
MANY_HEADS = Tile(heads=64, step=64, piece=512, warps=8, stages=2, programs=132)
WIDE = Tile(heads=16, step=16, piece=128, warps=4, stages=1, programs=264)
"""For elements of more than 16 bits, which fill registers sooner."""


@triton.jit
def _attend_part(
    query, latent, slots, out, part_out, high_out, total_out, scale, K, H, LANES,
    VALUE: tl.constexpr, ROPE: tl.constexpr, PIECE: tl.constexpr, BLOCK_R: tl.constexpr,
    SPAN: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """WHOLE: the only run of its query, written to `out` and not to be joined."""
    follow(CHAINED)
    n, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    h = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    real = (h < H)[:, None]
    own_slots = slots + n * K
    run = part * LANES + tl.arange(0, SPAN)
    live = tl.load(own_slots + run, mask=run < tl.minimum((part + 1) * LANES, K), other=-1) >= 0
    stop = tl.max(tl.where(live, run + 1, 0), 0)  # behind the last live lane
    c, r = tl.arange(0, PIECE)[None, :], tl.arange(0, BLOCK_R)[None, :]
    own = query + (n * H + h)[:, None] * (VALUE + ROPE)
    q_rope = tl.load(own + VALUE + r, mask=real & (r < ROPE), other=0)
    q_value, mixed = (), ()
    for first in tl.static_range(0, VALUE, PIECE):
        own_piece = tl.load(own + first + c, mask=real & (first + c < VALUE), other=0)
        q_value = q_value + (own_piece,)
        mixed = mixed + (tl.zeros((HEADS, PIECE), tl.float32),)
    high = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for at in tl.range(part * LANES, stop, STEP, num_stages=STAGES):
        lane = at + tl.arange(0, STEP)
        slot = tl.load(own_slots + lane, mask=lane < stop, other=-1)
        seen = (slot >= 0)[:, None]
        line = latent + slot.to(tl.int64)[:, None] * (VALUE + ROPE)
        turned = tl.load(line + VALUE + r, mask=seen & (r < ROPE), other=0)
        score = tl.dot(q_rope, tl.trans(turned), input_precision="ieee")  # [HEADS, STEP]
        keys = ()
        for nth in tl.static_range(len(q_value)):
            within = nth * PIECE + c < VALUE
            keys = keys + (tl.load(line + nth * PIECE + c, mask=seen & within, other=0),)
            score = tl.dot(q_value[nth], tl.trans(keys[nth]), score, input_precision="ieee")
        score = tl.where((slot >= 0)[None, :], score * scale, float("-inf"))
        highest = tl.maximum(high, tl.max(score, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp(score - shift[:, None])
        decay = tl.exp(high - shift)
        total = total * decay + tl.sum(weight, 1)
        weight = weight.to(latent.dtype.element_ty)
        fresh = ()
        for nth in tl.static_range(len(q_value)):
            kept = mixed[nth] * decay[:, None]
            fresh = fresh + (tl.dot(weight, keys[nth], kept, input_precision="ieee"),)
        mixed, high = fresh, highest
    cell = (n * parts + part) * H + h
    if WHOLE:
        # A total of 0 is a query without a lane; one that is not a number stays so.
        target, share = out + cell[:, None] * VALUE, 1 / tl.where(total == 0, 1.0, total)
    else:
        target, share = part_out + cell[:, None] * VALUE, tl.full((HEADS,), 1.0, tl.float32)
        tl.store(high_out + cell, high, mask=h < H)
        tl.store(total_out + cell, total, mask=h < H)
    for nth in tl.static_range(len(q_value)):
        value = (mixed[nth] * share[:, None]).to(target.dtype.element_ty)
        tl.store(target + nth * PIECE + c, value, mask=real & (nth * PIECE + c < VALUE))


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


@implement("sparse_mla", "cuda")
def sparse_mla(
    query: Tensor, latent: Tensor, slots: Tensor, scale: float, value_dim: int, fixed: bool = False
) -> Tensor:
    rope = latent.shape[2] - value_dim
    if query.dtype == torch.float64 or query.dtype != latent.dtype or rope == 0:
        return SPECIFICATIONS["sparse_mla"](query, latent, slots, scale, value_dim)
    queries, lanes = query.flatten(0, 1).contiguous(), slots.flatten(0, 1).contiguous()
    (count, heads), width = queries.shape[:2], lanes.shape[1]
    tile = tile_for(heads, query.element_size())
    run = FIXED if fixed else lanes_of_run(count * triton.cdiv(heads, tile.heads), width, tile)
    parts = triton.cdiv(width, run)
    step = count if parts == 1 else max(1, SCRATCH // (parts * heads * value_dim))
    out = query.new_empty((*query.shape[:3], value_dim))
    flat = out.flatten(0, 1)
    for at in range(0, count, step):
        piece = slice(at, at + step)
        _attend(queries[piece], latent, lanes[piece], flat[piece], scale, run, tile)
    return out


def tile_for(heads: int, element_size: int) -> Tile:
    if element_size > 2:
        return WIDE
    return MANY_HEADS if heads > 32 else FEW_HEADS


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


def _attend(
    query: Tensor, latent: Tensor, slots: Tensor, out: Tensor, scale: float, run: int, tile: Tile
) -> None:
    """query [N, H, D], slots [N, K] -> out [N, H, value_dim]"""
    (count, heads, dim), value, lanes = query.shape, out.shape[2], slots.shape[1]
    parts, block = triton.cdiv(lanes, run), max(16, triton.next_power_of_2(value))
    mixed, high, total = out, out, out
    if parts > 1:
        mixed = torch.empty((count, parts, heads, value), dtype=torch.float32, device=out.device)
        high, total = torch.empty((2, count, parts, heads), dtype=torch.float32, device=out.device)
    _attend_part[(count, parts, triton.cdiv(heads, tile.heads))](
        query, latent, slots, out, mixed, high, total, scale, lanes, heads, run,
        VALUE=value, ROPE=dim - value, PIECE=min(tile.piece, block),
        BLOCK_R=max(16, triton.next_power_of_2(dim - value)), SPAN=triton.next_power_of_2(run),
        STEP=tile.step, HEADS=tile.heads, WHOLE=parts == 1, STAGES=tile.stages, CHAINED=CHAINED,
        num_warps=tile.warps, launch_pdl=CHAINED,
    )  # fmt: skip
    if parts > 1:
        piece = min(256, block)
        _join_parts[(count, heads, triton.cdiv(value, piece))](
            mixed, high, total, out, parts, heads,
            VALUE=value, PARTS=triton.next_power_of_2(parts), BLOCK=piece, CHAINED=CHAINED,
            num_warps=2, launch_pdl=CHAINED,
        )  # fmt: skip
