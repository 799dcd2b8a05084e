# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA of up to 16 heads a program over packed rows, with layouts and waits written out.

Each of four warps owns a tile of 128 values: it reads the tile's codes of a step once, widens them
in registers, as they are multiplied by its part of the queries, which stays in registers too, and
leaves them in shared memory for the second product, where its weights are those of all warps times
the tile's scales. Only scores cross warps. `Tile.stages`: buffers of codes, all but one of them on
their way.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from freewheel.ops.cuda.chain import CHAINED
from freewheel.ops.cuda.explicit import barrier, follow, last_live, weights, widen_fp8
from freewheel.ops.cuda.packing import views
from freewheel.ops.cuda.runs import Run, Tile

TILE = Tile(heads=16, step=32, piece=128, warps=4, stages=2, programs=264)

RANK, ROPE = 512, 64
"""Values of a key, and its rotated part: what this kernel is written for."""

HEADS = gl.constexpr(16)
# The order in which a score's products are summed is free: a thread takes four codes in a row.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
LEFT_LONG = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 4))
RIGHT_LONG = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 4))
COPIES = gl.constexpr(gl.BlockedLayout([1, 1, 16], [1, 4, 8], [1, 4, 1], [2, 1, 0]))
SCALE_COPIES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
ROPE_COPIES = gl.constexpr(gl.BlockedLayout([1, 1, 8], [4, 4, 2], [1, 4, 1], [2, 0, 1]))
SCORE_LAYOUT = gl.constexpr(gl.SliceLayout(0, MMA.value))
FACTOR_LAYOUT = gl.constexpr(gl.SliceLayout(1, MMA.value))
HEAD_LAYOUT = gl.constexpr(gl.SliceLayout(1, SCORE_LAYOUT.value))
CODE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))
SCALE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SCORE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
KEY_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
ROPE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))
RUN_LAYOUT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def _fetch(codes, plain, scales, slots, buffers, columns, BYTES: gl.constexpr):
    """Start copying rows: codes, rotated parts, scales; the same slots in each copy's layout."""
    row, there = slots[0].to(gl.int64)[None, :, None], (slots[0] >= 0)[None, :, None]
    at = codes + row * BYTES + columns[0]
    async_copy.async_copy_global_to_shared(buffers[0], at, mask=there)
    row, there = slots[1].to(gl.int64)[None, :, None], (slots[1] >= 0)[None, :, None]
    tail = plain + row * (BYTES // 2) + 264 + columns[1]
    async_copy.async_copy_global_to_shared(buffers[1], tail, mask=there)
    row, there = slots[2].to(gl.int64)[:, None], (slots[2] >= 0)[:, None]
    at = scales + row * (BYTES // 4) + 128 + columns[2]
    async_copy.async_copy_global_to_shared(buffers[2], at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _slots_of(own_slots, first, lanes, stop):
    """The slots of a step, -1 behind `stop`, in the layout of each of `lanes`."""
    found = ()
    for nth in gl.static_range(3):
        lane = first + lanes[nth]
        found = found + (gl.load(own_slots + lane, mask=lane < stop, other=-1),)
    return found


@gluon.jit
def _queries(
    query, n, first_head, H, WIDTH: gl.constexpr, FIRST: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """bfloat16 [4, 16, WIDTH]: four pieces of columns, from FIRST on, of 16 heads."""
    tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    head = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    own = query + (n * H + first_head + head) * 576 + FIRST
    return gl.load(own + tile * WIDTH + column, mask=first_head + head < H, other=0)


@gluon.jit
def _places(STEP: gl.constexpr):
    """Lanes of a step and columns of a row, in the layouts of the three copies."""
    code_lane = gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, COPIES)))
    rope_lane = gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, ROPE_COPIES)))
    scale_lane = gl.arange(0, STEP, gl.SliceLayout(1, SCALE_COPIES))
    lanes = (code_lane, rope_lane, scale_lane)
    tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, COPIES)))[:, None, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, COPIES)))[None, None, :]
    rope_tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, ROPE_COPIES)))[:, None, None]
    rope_column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, ROPE_COPIES)))[None, None, :]
    scale_column = gl.arange(0, 4, gl.SliceLayout(0, SCALE_COPIES))[None, :]
    columns = (tile * 128 + column, rope_tile * 16 + rope_column, scale_column)
    return lanes, columns


@gluon.jit
def _joined(parted, partial, STEP: gl.constexpr):
    """The sum over tiles of float32 [4, 16, STEP], by way of shared memory."""
    partial.store(gl.reshape(parted, [64, STEP]))
    score = partial.slice(0, 16).load(SCORE_LAYOUT)
    for nth in gl.static_range(1, 4):
        score += partial.slice(nth * 16, 16).load(SCORE_LAYOUT)
    return score


@gluon.jit
def _leave(
    mixed, high, total, out, part_out, high_out, total_out, line, first_head, H,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Store a run of 16 heads; `line`: where its query's heads begin."""
    out_tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    h = first_head + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    v = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    if WHOLE:
        # A total of 0 is a query without a lane; one that is not a number stays so.
        part_of = 1 / gl.where(total == 0, 1.0, total)
        part_of = gl.convert_layout(part_of, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
        mixed = mixed * part_of[None, :, None]
        target = out
    else:
        target = part_out
        own_head = first_head + gl.arange(0, 16, HEAD_LAYOUT)
        gl.store(high_out + line + own_head, high, mask=own_head < H)
        gl.store(total_out + line + own_head, total, mask=own_head < H)
    h = h[None, :, None]
    value = mixed.to(target.dtype.element_ty)
    gl.store(target + (line + h) * 512 + out_tile * 128 + v, value, mask=h < H)


@gluon.jit
def _read(code_buffers, scale_buffers, which, key_buffer):
    """A step's keys [4, 128, STEP], kept in `key_buffer` too, their scales [4, STEP], and whether
    each is one [1, STEP]."""
    key = widen_fp8(code_buffers.index(which).permute((0, 2, 1)).load(RIGHT_LONG))
    key_buffer.permute((0, 2, 1)).store(key)
    scales = scale_buffers.index(which).permute((1, 0))
    # A dead lane's scale is what copies leave of it: 0, which no stored row has.
    return key, scales.load(FACTOR_LAYOUT), scales.slice(0, 1).load(SCORE_LAYOUT) != 0


@gluon.jit
def _attend(
    query, codes, plain, scales, slots, out, part_out, high_out, total_out, scale, K, H, LANES,
    BYTES: gl.constexpr, SPAN: gl.constexpr, STEP: gl.constexpr, WHOLE: gl.constexpr,
    CHAINED: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """512 values and 64 rotated ones a key. As `attention._attend_part` in all else."""

    follow(CHAINED)
    n, part, parts = gl.program_id(0).to(gl.int64), gl.program_id(1), gl.num_programs(1)
    first_head = gl.program_id(2) * HEADS
    own_slots = slots + n * K
    stop = last_live(own_slots, part, LANES, K, SPAN, RUN_LAYOUT)
    start = part * LANES
    key_buffer = gl.allocate_shared_memory(gl.bfloat16, [4, STEP, 128], KEY_SHARED)
    code_buffers = gl.allocate_shared_memory(gl.uint8, [BUFFERS, 4, STEP, 128], CODE_SHARED)
    scale_buffers = gl.allocate_shared_memory(gl.float32, [BUFFERS, STEP, 4], SCALE_SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, 4, STEP, 16], ROPE_SHARED)
    partial = gl.allocate_shared_memory(gl.float32, [4 * HEADS, STEP], SCORE_SHARED)

    lanes, columns = _places(STEP)
    q_value = _queries(query, n, first_head, H, 128, 0, LEFT_LONG)
    q_rope = _queries(query, n, first_head, H, 16, 512, LEFT)

    found = _slots_of(own_slots, start, lanes, stop)
    for nth in gl.static_range(BUFFERS - 1):
        buffers = (code_buffers.index(nth), ropes.index(nth), scale_buffers.index(nth))
        _fetch(codes, plain, scales, found, buffers, columns, BYTES)
        found = _slots_of(own_slots, start + (nth + 1) * STEP, lanes, stop)
    score_zero = gl.zeros([4, HEADS, STEP], gl.float32, MMA)
    mixed = gl.zeros([4, HEADS, 128], gl.float32, MMA)
    high = gl.full([HEADS], float("-inf"), gl.float32, HEAD_LAYOUT)
    total = gl.zeros([HEADS], gl.float32, HEAD_LAYOUT)
    which = 0
    for at in range(start, stop, STEP):
        async_copy.wait_group(BUFFERS - 2)
        barrier()
        free = gl.where(which == 0, BUFFERS - 1, which - 1)  # read in the step before
        buffers = (code_buffers.index(free), ropes.index(free), scale_buffers.index(free))
        _fetch(codes, plain, scales, found, buffers, columns, BYTES)
        found = _slots_of(own_slots, at + BUFFERS * STEP, lanes, stop)
        key, factor, seen = _read(code_buffers, scale_buffers, which, key_buffer)
        parted = mma_v2(q_value, key, score_zero)
        parted = parted * factor[:, None, :]
        parted = mma_v2(q_rope, ropes.index(which).permute((0, 2, 1)).load(RIGHT), parted)
        score = _joined(parted, partial, STEP)
        score = gl.where(seen, score * scale, float("-inf"))
        weight, decay, high = weights(score, high)
        total = total * decay + gl.sum(weight, 1)
        share = (weight[None, :, :] * factor[:, None, :]).to(gl.bfloat16)
        kept = gl.convert_layout(decay, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
        mixed = mma_v2(
            gl.convert_layout(share, LEFT), key_buffer.load(RIGHT), mixed * kept[None, :, None]
        )
        which = gl.where(which == BUFFERS - 1, 0, which + 1)

    _leave(
        mixed, high, total, out, part_out, high_out, total_out, (n * parts + part) * H, first_head,
        H, WHOLE,
    )  # fmt: skip


def serves(query: Tensor, value_dim: int) -> bool:
    """Whether this kernel is for query [.., H, D]: it COPIES and multiplies as Ampere can."""
    fits = query.is_cuda and query.dtype == torch.bfloat16
    fits = fits and (value_dim, query.shape[-1]) == (RANK, RANK + ROPE)
    return fits and torch.cuda.get_device_capability(query.device)[0] >= 8


def attend(run: Run, tile: Tile, latent: Tensor, scale: float) -> None:
    (count, heads, _), lanes = run.query.shape, run.slots.shape[1]
    _attend[(count, run.parts, triton.cdiv(heads, tile.heads))](
        run.query, *views(latent), run.slots, run.out, run.mixed, run.high, run.total, scale, lanes,
        heads, run.lanes,
        BYTES=latent.shape[2], SPAN=triton.next_power_of_2(run.lanes), STEP=tile.step,
        WHOLE=run.parts == 1, CHAINED=CHAINED, num_warps=tile.warps, launch_pdl=CHAINED,
        BUFFERS=tile.stages,
    )  # fmt: skip
