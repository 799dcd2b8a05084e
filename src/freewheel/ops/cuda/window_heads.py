# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks of 64 heads a program on Hopper: `many_heads`, over two lists of keys that
are values too.

A program takes a run of tiles of 64 lanes, the window's before the entries'. A run that is all of
its query ends it: the sink and the way back of what turned cost no launch of their own.

Scales of packed keys are powers of two, so a key becomes bfloat16 without rounding, once for both
products. Its rotated part is copied past the registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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
from freewheel.ops.cuda.explicit import barrier, follow, weights
from freewheel.ops.cuda.key_codes import TAILS, keep, load_codes
from freewheel.ops.cuda.many_heads import (
    COLUMN_LAYOUT,
    HEADS,
    MIXED_LAYOUT,
    ROW_LAYOUT,
    RUN_LAYOUT,
    SCORE_LAYOUT,
    SHARE_LAYOUT,
    STEP,
    TILE,
    WIDE_SHARED,
)
from freewheel.ops.cuda.packing import views
from freewheel.ops.cuda.runs import lanes_of_run
from freewheel.ops.cuda.sink_parts import Close, Rooms, attend_in_parts

DIM, ROPE, BYTES = 512, 64, 584
"""Of a key: its values, those of them that turn, and the bytes of a packed one."""

FEW_HEADS, FIXED_HEADS = 16, 33
"""Heads from which on this kernel may be in front; and from which on one order of sums is its."""

FIXED = 192
"""Lanes of a run whose length must not depend on the number of queries."""

ENDS_LAYOUT = gl.constexpr(gl.SliceLayout(1, SCORE_LAYOUT.value))


@dataclass(frozen=True)
class Keys:
    """A cache as the kernel takes it: plain keys twice, or the bytes of packed ones and the same as
    bfloat16, and half the rows of a page."""

    codes: Tensor  # bfloat16 [n_pages, page_rows, D], or uint8 [n]
    plain: Tensor  # bfloat16 [n_pages, page_rows, D], or bfloat16 [n / 2]
    pairs: int


def plain_rows(cache: Tensor) -> Keys:
    return Keys(cache, cache, 0)


def packed_rows(cache: Tensor) -> Keys:
    codes, plain, _ = views(cache)
    return Keys(codes, plain, cache.shape[1] // 2)


def is_in_front(queries: int, heads: int, packed: bool) -> bool:
    """Whether there are heads enough to be faster than kernels of 16 a program: as measured."""
    if heads < 32:
        return heads >= FEW_HEADS and queries * heads >= 512
    return queries * heads >= (128 if packed else 256)


def serves(query: Tensor, caches: tuple[Tensor, Tensor], span: int, fixed: bool) -> bool:
    """Whether this kernel is for query [B, W, H, D]: its instructions are Hopper's.

    `span`: values that turn back. A page of packed keys must begin where 16 bytes can be read at
    once: its rows are even. `fixed`: not by the number of queries.
    """
    (batch, width, heads, dim), packed = query.shape, caches[0].dtype == torch.uint8
    many = heads >= FIXED_HEADS if fixed else is_in_front(batch * width, heads, packed)
    fits = query.is_cuda and query.dtype == torch.bfloat16
    fits = fits and many and dim == DIM and span in (0, ROPE)
    if packed:
        even = all(cache.shape[1] % 2 == 0 for cache in caches)
        fits = fits and span == ROPE and even and all(c.shape[2] == BYTES for c in caches)
    return fits and torch.cuda.get_device_capability(query.device)[0] == 9


@gluon.jit
def _stop(lanes, begin, end, SPAN: gl.constexpr):
    """The lane behind the last one of begin .. end that names a slot; `begin` if none does."""
    lane = begin + gl.arange(0, SPAN, RUN_LAYOUT)
    live = gl.load(lanes + lane, mask=lane < end, other=-1) >= 0
    return gl.max(gl.where(live, lane + 1, begin), 0)


@gluon.jit
def _run_of(slots, entry_slots, K, E, part, TILES, SPAN: gl.constexpr):
    """(first lane of each list, the lanes behind their last live ones, how many tiles are keys,
    how many there are), of a run of TILES tiles; entries are counted as if they began it."""
    before = gl.cdiv(K, STEP)
    first = part * TILES
    key = gl.minimum(first, before) * STEP
    entry = gl.maximum(first - before, 0) * STEP
    key_stop = _stop(slots, key, gl.minimum((first + TILES) * STEP, K), SPAN)
    entry_stop = _stop(entry_slots, entry, gl.minimum((first + TILES - before) * STEP, E), SPAN)
    own = gl.cdiv(key_stop - key, STEP)
    count = own + gl.cdiv(entry_stop - entry, STEP)
    return key, entry - own * STEP, key_stop, entry_stop, own, count


@gluon.jit
def _slots_of(lists, run, nth, lane):
    """Slots of the run's nth tile, -1 where there is none."""
    key, entry, key_stop, entry_stop, own, _ = run
    place = nth * STEP + gl.where(nth < own, key, entry) + lane
    stop = gl.where(nth < own, key_stop, entry_stop)
    return gl.load(gl.where(nth < own, lists[0], lists[1]) + place, mask=place < stop, other=-1)


@gluon.jit
def _fetch(caches, run, nth, slot, values, column, PACKED: gl.constexpr):
    """Start copying the run's nth tile; what is to be widened first is returned: `load_codes`."""
    own = nth < run[4]
    plain, there = gl.where(own, caches[0][1], caches[1][1]), (slot >= 0)[:, None]
    found = ()
    if PACKED:
        pairs = gl.where(own, caches[0][2], caches[1][2])
        page, row = slot // (2 * pairs), slot % (2 * pairs)
        start = page.to(gl.int64) * pairs
        codes = gl.where(own, caches[0][0], caches[1][0])
        found = load_codes(
            codes, start * 1168 + row * 576, start * 1168 + pairs * 1152 + row * 8, slot
        )
        tail = plain + (start * 584 + row * 288 + 224)[:, None] + column[None, :]
        rest = values.slice(448, 64, dim=1)
        async_copy.async_copy_global_to_shared(rest, tail, mask=there)
    else:
        line = plain + slot.to(gl.int64)[:, None] * 512 + column[None, :]
        async_copy.async_copy_global_to_shared(values, line, mask=there)
    async_copy.commit_group()
    return found


@gluon.jit
def _folded(weight):
    """float32 [HEADS, 2, 4]: what lies in one thread of [HEADS, STEP], added up."""
    return gl.sum(gl.sum(gl.reshape(weight, [HEADS, 2, STEP // 8 // 2, 4, 2]), 4), 2)


@gluon.jit
def _all_tiles(caches, lists, run, scale, query, buffers, lane, column, PACKED: gl.constexpr):
    """The weighted sum of a run, its highest score and its sums of weights [HEADS, STEP]."""
    score_lane = gl.arange(0, STEP, gl.SliceLayout(0, SCORE_LAYOUT))
    score_zero = gl.zeros([HEADS, STEP], gl.float32, SCORE_LAYOUT)
    mixed = gl.zeros([HEADS, 512], gl.float32, MIXED_LAYOUT)
    high = gl.full([HEADS], float("-inf"), gl.float32, ENDS_LAYOUT)
    total = _folded(score_zero)  # summed up behind the last tile
    slot = _slots_of(lists, run, 0, lane)
    found = _fetch(caches, run, 0, slot, buffers.index(0), column, PACKED)
    if PACKED:
        keep(found, buffers.index(0))
    slot = _slots_of(lists, run, 1, lane)
    which = 0
    for nth in range(0, run[5]):
        now, other = buffers.index(which), buffers.index(1 - which)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        score = warpgroup_mma(query, now.permute((1, 0)), score_zero, use_acc=False, is_async=True)
        found = _fetch(caches, run, nth + 1, slot, other, column, PACKED)
        slot = _slots_of(lists, run, nth + 2, lane)
        seen = (_slots_of(lists, run, nth, score_lane) >= 0)[None, :]
        score = warpgroup_mma_wait(0, deps=(score,))
        score = gl.where(seen, score * scale, float("-inf"))
        weight, decay, high = weights(score, high)
        shrunk = gl.convert_layout(decay, gl.SliceLayout(1, gl.SliceLayout(2, total.type.layout)))
        total = total * shrunk[:, None, None] + _folded(weight)
        share = gl.convert_layout(weight.to(gl.bfloat16), SHARE_LAYOUT)
        kept = gl.convert_layout(decay, gl.SliceLayout(1, MIXED_LAYOUT))
        mixed = warpgroup_mma(share, now, mixed * kept[:, None], is_async=True)
        if PACKED:
            keep(found, other)
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        which = 1 - which
    total = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), ENDS_LAYOUT)
    return mixed, high, total


@gluon.jit
def _store_part(values, out, cell, h, H, first, turn, TURNED: gl.constexpr):
    """Values [HEADS, 2, 64] of columns first .. first + 64 and as many 256 further on.

    TURNED: the last of those are turned back by `turn`: their query's line of the rope table.
    """
    if TURNED:
        one, other = gl.split(gl.reshape(values, [HEADS, 2, 32, 2]))
        layout: gl.constexpr = one.type.layout
        half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
        pair = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
        angle = turn + pair + half * 0
        cos = gl.load(angle, mask=half > 0, other=1)
        sin = gl.load(angle + 32, mask=half > 0, other=0)
        low, up = one * cos + other * sin, other * cos - one * sin
        values = gl.reshape(gl.join(low, up), [HEADS, 2, 64])
    place: gl.constexpr = values.type.layout
    rows = gl.convert_layout(h, gl.SliceLayout(1, gl.SliceLayout(2, place)))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, place)))
    column = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, place)))
    target = out + (cell + rows)[:, None, None] * 512 + half[None, :, None] * 256
    target = target + first + column[None, None, :]
    gl.store(target, values.to(out.dtype.element_ty), mask=(rows < H)[:, None, None])


@gluon.jit
def _end(mixed, high, total, sinks, turn, out, line, first_head, H, TURNED: gl.constexpr):
    """Store 64 heads' outputs; `line`: where their query's heads begin."""
    own_head = first_head + gl.arange(0, HEADS, ENDS_LAYOUT)
    sink = gl.load(sinks + own_head, mask=own_head < H, other=0).to(gl.float32)
    shift = gl.maximum(high, sink)  # finite: sinks are
    share = gl.exp(high - shift)
    share = share / (total * share + gl.exp(sink - shift))
    mixed = mixed * gl.convert_layout(share, gl.SliceLayout(1, MIXED_LAYOUT))[:, None]
    h = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, MIXED_LAYOUT))
    quarters = gl.permute(gl.reshape(mixed, [HEADS, 2, 2, 2, 64]), (0, 1, 4, 2, 3))
    even, odd = gl.split(quarters)  # of columns 64 and 192 in 256 there are the odd ones
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    _store_part(first, out, line, h, H, 0, turn, False)
    _store_part(second, out, line, h, H, 64, turn, False)
    _store_part(third, out, line, h, H, 128, turn, False)
    _store_part(fourth, out, line, h, H, 192, turn, TURNED)


@gluon.jit(do_not_specialize=["K", "E", "TILES", "groups", "key_pairs", "entry_pairs"])
def _attend(
    query, keys, key_plain, slots, entries, entry_plain, entry_slots, sinks, positions, table, out,
    part_out, high_out, total_out, scale, K, E, H, TILES, groups, key_pairs, entry_pairs,
    SPAN: gl.constexpr, WHOLE: gl.constexpr, TURNED: gl.constexpr, PACKED: gl.constexpr,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """64 heads over TILES tiles of 64 lanes; WHOLE: all that their query has."""
    follow(CHAINED)
    # Programs of a query's groups of heads run side by side and share its keys in the L2 cache.
    n, part, parts = (gl.program_id(0) // groups).to(gl.int64), gl.program_id(1), gl.num_programs(1)
    first_head = gl.program_id(0) % groups * HEADS
    lists = (slots + n * K, entry_slots + n * E)
    run = _run_of(lists[0], lists[1], K, E, part, TILES, SPAN)

    own_query = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 512], WIDE_SHARED)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, STEP, 512], WIDE_SHARED)
    column = gl.arange(0, 512, COLUMN_LAYOUT)
    h = first_head + gl.arange(0, HEADS, ROW_LAYOUT)
    at = query + (n * H + h)[:, None] * 512 + column[None, :]
    real = (h < H) & (run[5] > 0)
    async_copy.async_copy_global_to_shared(own_query, at, mask=real[:, None])
    async_copy.commit_group()

    lane = gl.arange(0, STEP, ROW_LAYOUT)
    if PACKED:
        lane = gl.arange(0, STEP, gl.SliceLayout(1, TAILS))
        column = gl.arange(0, 64, gl.SliceLayout(0, TAILS))
    caches = ((keys, key_plain, key_pairs), (entries, entry_plain, entry_pairs))
    mixed, high, total = _all_tiles(
        caches, lists, run, scale, own_query, buffers, lane, column, PACKED
    )
    line = (n * parts + part) * H
    if WHOLE:
        turn = table
        if TURNED:
            turn = table + gl.load(positions + n).to(gl.int64) * 64
        _end(mixed, high, total, sinks, turn, out, line, first_head, H, TURNED)
    else:
        own_head = first_head + gl.arange(0, HEADS, ENDS_LAYOUT)
        gl.store(high_out + line + own_head, high, mask=own_head < H)
        gl.store(total_out + line + own_head, total, mask=own_head < H)
        row = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, MIXED_LAYOUT))
        v = gl.arange(0, 512, gl.SliceLayout(0, MIXED_LAYOUT))
        # What has no lane is not read either.
        real = ((row < H) & (run[5] > 0))[:, None]
        gl.store(part_out + (line + row)[:, None] * 512 + v[None, :], mixed, mask=real)


def attend(
    query: Tensor,
    own: tuple[Keys, Tensor],
    more: tuple[Keys, Tensor],
    scale: float,
    close: Close,
    out: Tensor,
    fixed: bool,
) -> None:
    """query [N, H, D], own and more: a cache, and its slots int32 [N, K] -> out [N, H, D].

    `fixed`: in an order of sums that the lanes alone decide.
    """
    tiles = tiles_of(own[1], more[1])
    programs = query.shape[0] * triton.cdiv(query.shape[1], TILE.heads)
    length = FIXED if fixed else lanes_of_run(programs, tiles * TILE.step, TILE)
    parts = max(1, triton.cdiv(tiles * TILE.step, length))
    launch = partial(_launch, scale=scale, close=close, out=out, tiles=length // TILE.step)
    if parts == 1:
        launch(query, own, more, (out, out, out))
    else:
        attend_in_parts(launch, query, own, more, close, out, parts)


def tiles_of(slots: Tensor, entry_slots: Tensor) -> int:
    """Tiles of lanes: of the window and of entries, each by itself."""
    return sum(triton.cdiv(lanes.shape[1], TILE.step) for lanes in (slots, entry_slots))


def _launch(
    query: Tensor,
    own: tuple[Keys, Tensor],
    more: tuple[Keys, Tensor],
    rooms: Rooms,
    scale: float,
    close: Close,
    out: Tensor,
    tiles: int,
) -> None:
    """Parts of `tiles` tiles, left in `rooms`; a single one is closed into `out`."""
    (count, heads, _), (keys, slots), (entries, picks) = query.shape, own, more
    groups = triton.cdiv(heads, TILE.heads)
    parts = max(1, triton.cdiv(tiles_of(slots, picks), tiles))
    span = max(1024, triton.next_power_of_2(tiles * TILE.step))  # few values, to compile few
    _attend[(count * groups, parts)](
        query, keys.codes, keys.plain, slots, entries.codes, entries.plain, picks, close.sinks,
        close.positions, close.table, out, *rooms, scale, slots.shape[1], picks.shape[1], heads,
        tiles, groups, keys.pairs, entries.pairs,
        SPAN=span, WHOLE=parts == 1, TURNED=close.span > 0, PACKED=keys.pairs > 0,
        CHAINED=CHAINED, num_warps=TILE.warps, launch_pdl=CHAINED,
    )  # fmt: skip
