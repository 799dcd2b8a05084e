# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA of 64 heads a program on Hopper, with layouts and waits written out.

Keys of the next tile are on their way, in the other of two buffers, while this one is multiplied.
Packed rows are widened by the threads that wait for the second product, once for both.

A packed key is scaled once, not by each head: by its largest scale behind the first product and in
front of the second, exactly, and before them by each tile's share of that, whose product with a
code is rounded to bfloat16. So tiles with the largest scale are exact, and the others carry the
error that a plain row carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from freewheel.ops.cuda.chain import CHAINED
from freewheel.ops.cuda.explicit import barrier, follow, last_live, slots_at, weights, widen_fp8
from freewheel.ops.cuda.packing import views
from freewheel.ops.cuda.runs import Run, Tile

TILE = Tile(heads=64, step=64, piece=512, warps=8, stages=1, programs=132)

RANK, ROPE = 512, 64
"""Values of a key, and its rotated part: what this kernel is written for."""


@dataclass(frozen=True)
class Rows:
    """A cache as the kernel takes it: plain rows, or the views of packed ones."""

    latent: Tensor  # bfloat16 [n_pages, page_size, D], or all of the bytes
    views: tuple[Tensor, Tensor, Tensor]  # uint8 [n], bfloat16 [n / 2], float32 [n / 4]
    bytes: int

    @property
    def packed(self) -> bool:
        return self.bytes > 0


def plain_rows(latent: Tensor) -> Rows:
    return Rows(latent, (latent, latent, latent), 0)


def packed_rows(latent: Tensor) -> Rows:
    codes, plain, scales = views(latent)
    return Rows(plain, (codes, plain, scales), latent.shape[2])


def serves(query: Tensor, value_dim: int) -> bool:
    """Whether this kernel is for query [.., H, D]: its instructions are Hopper's."""
    fits = query.is_cuda and query.dtype == torch.bfloat16
    fits = fits and (value_dim, query.shape[-1]) == (RANK, RANK + ROPE) and query.shape[-2] > 32
    return fits and torch.cuda.get_device_capability(query.device)[0] == 9


STEP, HEADS = gl.constexpr(64), gl.constexpr(64)
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
BYTES_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1, 16], [8, 4, 1], [8, 1, 1], [2, 1, 0]))
SCORE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
MIXED_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
SHARE_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, MIXED_LAYOUT.value, 2))
WIDE_SHARED = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 512], gl.bfloat16))
ROPE_SHARED = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
SCALE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
RUN_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, COPIES.value))
COLUMN_LAYOUT = gl.constexpr(gl.SliceLayout(0, COPIES.value))
CHUNK_LAYOUT = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, BYTES_LAYOUT.value)))


@gluon.jit
def _widen(codes, scale):
    """bfloat16 of e4m3 codes times their scales, float32, rounded once.

    The scale goes in as two bfloat16 numbers whose sum it is, to 16 bits.
    """
    wide = widen_fp8(codes)
    first = scale.to(gl.bfloat16)
    rest = (scale - first.to(gl.float32)).to(gl.bfloat16)
    first, wide = gl.broadcast(first, wide)
    rest, wide = gl.broadcast(rest, wide)
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t; }",
        "=r,r,r,r", [wide, first, rest], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _codes(codes, scales, slot, c, BYTES: gl.constexpr):
    """uint8 [STEP, 32, 16] and scales of packed rows, zeros of dead lanes.

    Scales are the row's largest, float32 [STEP, 1], and each tile's share of that [STEP, 32, 1].
    """
    row, there = slot.to(gl.int64)[:, None, None], (slot >= 0)[:, None, None]
    at = c[1][None, :, None] * 16 + c[0][None, None, :]
    code = gl.load(codes + row * BYTES + at, mask=there, other=0)
    tile = c[1][None, :, None] // 8
    scale = gl.load(scales + row * (BYTES // 4) + 128 + tile, mask=there, other=0)
    largest = gl.max(scale, 1)
    return code, largest, scale / gl.where(largest == 0, 1.0, largest)[:, None, :]


@gluon.jit
def _fetch(latent, slot, value_buffer, rope_buffer, c, r, WIDTH: gl.constexpr):
    """Start copying rows of a plain cache."""
    row, there = slot.to(gl.int64)[:, None] * WIDTH, (slot >= 0)[:, None]
    async_copy.async_copy_global_to_shared(value_buffer, latent + row + c[None, :], mask=there)
    async_copy.async_copy_global_to_shared(rope_buffer, latent + row + 512 + r[None, :], mask=there)
    async_copy.commit_group()


@gluon.jit
def _fetch_packed(
    codes, plain, scales, slot, byte_slot, rope_buffer, c, r, BYTES: gl.constexpr
):  # fmt: skip
    """Start copying the rotated parts of packed rows, and load the rest: `_codes`."""
    code, largest, factor = _codes(codes, scales, byte_slot, c, BYTES)
    tail = plain + slot.to(gl.int64)[:, None] * (BYTES // 2) + 264 + r[None, :]
    async_copy.async_copy_global_to_shared(rope_buffer, tail, mask=(slot >= 0)[:, None])
    async_copy.commit_group()
    return code, largest, factor


@gluon.jit
def _leave(
    mixed, high, total, out, part_out, high_out, total_out, where, first_head, H,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Store a run of 64 heads, which begins at head `where` of all runs."""
    h = first_head + gl.arange(0, 64, gl.SliceLayout(1, MIXED_LAYOUT))
    v = gl.arange(0, 512, gl.SliceLayout(0, MIXED_LAYOUT))
    cell = where + h
    if WHOLE:
        # A total of 0 is a query without a lane; one that is not a number stays so.
        part_of = 1 / gl.where(total == 0, 1.0, total)
        mixed = mixed * gl.convert_layout(part_of, gl.SliceLayout(1, MIXED_LAYOUT))[:, None]
        target = out + cell[:, None] * 512
    else:
        target = part_out + cell[:, None] * 512
        own_head = first_head + gl.arange(0, 64, gl.SliceLayout(1, SCORE_LAYOUT))
        gl.store(high_out + where + own_head, high, mask=own_head < H)
        gl.store(total_out + where + own_head, total, mask=own_head < H)
    value = mixed.to(target.dtype.element_ty)
    gl.store(target + v[None, :], value, mask=(h < H)[:, None])


@gluon.jit
def _fetch_queries(query, q_value, q_rope, first_row, first_head, H, c, r):
    """Start copying 64 heads' queries."""
    h = first_head + gl.arange(0, HEADS, ROW_LAYOUT)
    own = query + (first_row + h)[:, None] * 576
    real = (h < H)[:, None]
    async_copy.async_copy_global_to_shared(q_value, own + c[None, :], mask=real)
    async_copy.async_copy_global_to_shared(q_rope, own + 512 + r[None, :], mask=real)
    async_copy.commit_group()


@gluon.jit
def _all_tiles(
    caches, own_slots, start, stop, scale, slot, queries, buffers, places,
    BYTES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The weighted sum of a run, its highest score and its sums of weights [HEADS, STEP]."""
    latent, codes, plain, scales = caches
    q_value, q_rope = queries
    values, ropes, row_scales = buffers
    c, r, inner, outer, lane, byte_lane = places
    score_lane = gl.arange(0, STEP, gl.SliceLayout(0, SCORE_LAYOUT))
    score_zero = gl.zeros([HEADS, STEP], gl.float32, SCORE_LAYOUT)
    mixed = gl.zeros([HEADS, 512], gl.float32, MIXED_LAYOUT)
    high = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
    total = score_zero  # summed over lanes behind the last
    which = 0
    for at in range(start, stop, STEP):
        now_values, now_ropes = values.index(which), ropes.index(which)
        next_values, next_ropes = values.index(1 - which), ropes.index(1 - which)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        score = warpgroup_mma(
            q_value, now_values.permute((1, 0)), score_zero, use_acc=False, is_async=True
        )
        ahead = at + STEP
        if PACKED:
            turned = warpgroup_mma(
                q_rope, now_ropes.permute((1, 0)), score_zero, use_acc=False, is_async=True
            )
            byte_place = ahead + byte_lane
            byte_slot = gl.load(own_slots + byte_place, mask=byte_place < stop, other=-1)
            code, largest, factor = _fetch_packed(
                codes, plain, scales, slot, byte_slot, next_ropes, (inner, outer), r, BYTES
            )
        else:
            score = warpgroup_mma(q_rope, now_ropes.permute((1, 0)), score, is_async=True)
            _fetch(latent, slot, next_values, next_ropes, c, r, 576)
        slot = slots_at(own_slots, ahead + STEP + lane, stop)
        seen = (slots_at(own_slots, at + score_lane, stop) >= 0)[None, :]
        if PACKED:
            score, turned = warpgroup_mma_wait(0, deps=(score, turned))
            row_scale = row_scales.index(which).load(gl.SliceLayout(0, SCORE_LAYOUT))[None, :]
            score = score * row_scale + turned
        else:
            score = warpgroup_mma_wait(0, deps=(score,))
        score = gl.where(seen, score * scale, float("-inf"))
        weight, decay, high = weights(score, high)
        total = total * decay[:, None] + weight
        if PACKED:
            weight = weight * row_scale
        share = gl.convert_layout(weight.to(gl.bfloat16), SHARE_LAYOUT)
        kept = gl.convert_layout(decay, gl.SliceLayout(1, MIXED_LAYOUT))
        mixed = warpgroup_mma(share, now_values, mixed * kept[:, None], is_async=True)
        if PACKED:
            next_values.store(gl.reshape(_widen(code, factor), [STEP, 512]))
            row_scales.index(1 - which).store(gl.reshape(largest, [STEP]))
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        which = 1 - which
    return mixed, high, total


@gluon.jit
def _attend(
    query, latent, codes, plain, scales, slots, out, part_out, high_out, total_out,
    scale, K, H, LANES, groups,
    BYTES: gl.constexpr, SPAN: gl.constexpr, WHOLE: gl.constexpr, CHAINED: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """512 values and 64 rotated ones a key. As `attention._attend_part` in all else."""

    follow(CHAINED)
    # Programs of a query's groups of heads run side by side and share its keys in the L2 cache.
    n, part, parts = (gl.program_id(0) // groups).to(gl.int64), gl.program_id(1), gl.num_programs(1)
    first_head = gl.program_id(0) % groups * HEADS
    own_slots = slots + n * K
    start, stop = part * LANES, last_live(own_slots, part, LANES, K, SPAN, RUN_LAYOUT)

    q_value = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 512], WIDE_SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 64], ROPE_SHARED)
    values = gl.allocate_shared_memory(gl.bfloat16, [2, STEP, 512], WIDE_SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, STEP, 64], ROPE_SHARED)
    row_scales = gl.allocate_shared_memory(gl.float32, [2, STEP], SCALE_SHARED)

    c = gl.arange(0, 512, COLUMN_LAYOUT)
    r = gl.arange(0, 64, COLUMN_LAYOUT)
    _fetch_queries(query, q_value, q_rope, n * H, first_head, H, c, r)

    lane = gl.arange(0, STEP, ROW_LAYOUT)
    byte_lane = gl.arange(0, STEP, CHUNK_LAYOUT)
    inner = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BYTES_LAYOUT)))
    outer = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, BYTES_LAYOUT)))

    slot = gl.load(own_slots + start + lane, mask=start + lane < stop, other=-1)
    if PACKED:
        byte_place = start + byte_lane
        byte_slot = gl.load(own_slots + byte_place, mask=byte_place < stop, other=-1)
        code, largest, factor = _fetch_packed(
            codes, plain, scales, slot, byte_slot, ropes.index(0), (inner, outer), r, BYTES
        )
        values.index(0).store(gl.reshape(_widen(code, factor), [STEP, 512]))
        row_scales.index(0).store(gl.reshape(largest, [STEP]))
    else:
        _fetch(latent, slot, values.index(0), ropes.index(0), c, r, 576)
    slot = gl.load(own_slots + start + STEP + lane, mask=start + STEP + lane < stop, other=-1)

    mixed, high, total = _all_tiles(
        (latent, codes, plain, scales), own_slots, start, stop, scale, slot,
        (q_value, q_rope), (values, ropes, row_scales), (c, r, inner, outer, lane, byte_lane),
        BYTES, PACKED,
    )  # fmt: skip
    where = (n * parts + part) * H
    _leave(
        mixed, high, gl.sum(total, 1), out, part_out, high_out, total_out, where, first_head, H,
        WHOLE,
    )  # fmt: skip


def attend(run: Run, tile: Tile, rows: Rows, scale: float) -> None:
    (count, heads, _), lanes = run.query.shape, run.slots.shape[1]
    groups = triton.cdiv(heads, tile.heads)
    _attend[(count * groups, run.parts)](
        run.query, rows.latent, *rows.views, run.slots, run.out, run.mixed, run.high, run.total,
        scale, lanes, heads, run.lanes, groups,
        BYTES=rows.bytes, SPAN=triton.next_power_of_2(run.lanes), WHOLE=run.parts == 1,
        CHAINED=CHAINED, PACKED=rows.packed,
        num_warps=tile.warps, launch_pdl=CHAINED,
    )  # fmt: skip
