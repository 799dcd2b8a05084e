# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA over packed rows: codes become bfloat16 in registers, exactly.

As `ops.cuda.attention`, whose plan of runs and join serve here too. Scales stay outside of the
products: a latent has four tiles of 128, so its score is four products, each times its scale, and
its share of a tile's values is the weight times that scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda import many_heads, packed_few
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.packed_attention import in_registers
from freewheel.ops.cuda.packing import views
from freewheel.ops.cuda.runs import Run, Tile, attend_by_runs
from freewheel.ops.cuda.streaming import widen_once
from freewheel.ops.registry import SPECIFICATIONS, implement

RANK = 512
"""Values of a latent that these kernels are written for: four tiles."""

FEW_HEADS = Tile(heads=16, step=32, piece=128, warps=4, stages=2, programs=264)
WIDE = Tile(heads=16, step=16, piece=128, warps=4, stages=1, programs=264)
"""For elements of more than 16 bits, which fill registers sooner."""


@triton.jit
def _attend_part(
    query, codes, plain, scales, slots, out, part_out, high_out, total_out, scale, K, H, LANES,
    ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BYTES: tl.constexpr, SPAN: tl.constexpr,
    STEP: tl.constexpr, HEADS: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """WHOLE: the only run of its query, written to `out` and not to be joined."""
    follow(CHAINED)
    n, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    h = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    real = (h < H)[None, :, None]
    own_slots = slots + n * K
    run = part * LANES + tl.arange(0, SPAN)
    live = tl.load(own_slots + run, mask=run < tl.minimum((part + 1) * LANES, K), other=-1) >= 0
    stop = tl.max(tl.where(live, run + 1, 0), 0)  # behind the last live lane
    tile = tl.arange(0, 4)[:, None, None]
    c = tile * 128 + tl.arange(0, 128)[None, None, :]
    r = tile * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)[None, None, :]
    own = query + (n * H + h)[None, :, None] * (512 + ROPE)
    q_value = tl.load(own + c, mask=real, other=0)  # [4, HEADS, 128]
    q_rope = tl.load(own + 512 + r, mask=real & (r < ROPE), other=0)
    high = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((4, HEADS, 128), tl.float32)
    for at in tl.range(part * LANES, stop, STEP, num_stages=STAGES):
        lane = at + tl.arange(0, STEP)
        slot = tl.load(own_slots + lane, mask=lane < stop, other=-1)
        seen, row = slot >= 0, slot.to(tl.int64)
        line, there = row[None, :, None], seen[None, :, None]
        code = tl.load(codes + line * BYTES + c, mask=there, other=0)
        tail = plain + line * (BYTES // 2) + 264 + r
        turned = tl.load(tail, mask=there & (r < ROPE), other=0).to(q_rope.dtype)
        place = scales + row[None, :] * (BYTES // 4) + 128 + tl.arange(0, 4)[:, None]
        factor = tl.load(place, mask=seen[None, :], other=0)[:, None, :]
        key = widen_once(code, ASM)  # [4, STEP, 128]
        parted = tl.dot(q_value, tl.trans(key, 0, 2, 1), input_precision="ieee") * factor
        parted += tl.dot(q_rope, tl.trans(turned, 0, 2, 1), input_precision="ieee")
        score = tl.sum(parted, 0)  # [HEADS, STEP]
        score = tl.where(seen[None, :], score * scale, float("-inf"))
        highest = tl.maximum(high, tl.max(score, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp(score - shift[:, None])
        decay = tl.exp(high - shift)
        total = total * decay + tl.sum(weight, 1)
        share = (weight[None, :, :] * factor).to(key.dtype)
        mixed = tl.dot(share, key, mixed * decay[None, :, None], input_precision="ieee")
        high = highest
    cell = (n * parts + part) * H + h
    if WHOLE:
        # A total of 0 is a query without a lane; one that is not a number stays so.
        target, part_of = out, 1 / tl.where(total == 0, 1.0, total)
    else:
        target, part_of = part_out, tl.full((HEADS,), 1.0, tl.float32)
        tl.store(high_out + cell, high, mask=h < H)
        tl.store(total_out + cell, total, mask=h < H)
    value = (mixed * part_of[None, :, None]).to(target.dtype.element_ty)
    tl.store(target + cell[None, :, None] * 512 + c, value, mask=real)


@implement("fp8_sparse_mla", "cuda")
def fp8_sparse_mla(
    query: Tensor, latent: Tensor, slots: Tensor, scale: float, value_dim: int, fixed: bool = False
) -> Tensor:
    if query.dtype == torch.float64 or value_dim != RANK:
        return SPECIFICATIONS["fp8_sparse_mla"](query, latent, slots, scale, value_dim)
    out = query.new_empty((*query.shape[:3], value_dim))
    if many_heads.serves(query, value_dim):
        own = many_heads.packed_rows(latent)
        attend_by_runs(many_heads.attend, (own, scale), query, slots, out, many_heads.TILE, fixed)
    elif packed_few.serves(query, value_dim):
        own, tile = (latent, scale), packed_few.TILE
        attend_by_runs(packed_few.attend, own, query, slots, out, tile, fixed)
    else:
        attend_by_runs(_attend, (latent, scale), query, slots, out, tile_for(query), fixed)
    return out


def tile_for(query: Tensor) -> Tile:
    return FEW_HEADS if query.element_size() == 2 else WIDE


def _attend(run: Run, tile: Tile, latent: Tensor, scale: float) -> None:
    (count, heads, dim), lanes = run.query.shape, run.slots.shape[1]
    _attend_part[(count, run.parts, triton.cdiv(heads, tile.heads))](
        run.query, *views(latent), run.slots, run.out, run.mixed, run.high, run.total, scale, lanes,
        heads, run.lanes,
        ROPE=dim - RANK, BLOCK_R=max(16, triton.next_power_of_2(dim - RANK)),
        BYTES=latent.shape[2], SPAN=triton.next_power_of_2(run.lanes), STEP=tile.step,
        HEADS=tile.heads, WHOLE=run.parts == 1, STAGES=tile.stages, ASM=in_registers(run.query),
        CHAINED=CHAINED, num_warps=tile.warps, launch_pdl=CHAINED,
    )  # fmt: skip
