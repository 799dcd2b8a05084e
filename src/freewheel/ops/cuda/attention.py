# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA: a program attends to a run of a query's lanes, another joins the runs if there are
several.

A tile of keys is loaded in pieces of columns, each multiplied by itself: a thread then holds few
addresses, and so little else that two programs share a multiprocessor, one of which waits for its
keys while the other multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda import many_heads, row_attention
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.runs import Run, Tile, attend_by_runs
from freewheel.ops.registry import SPECIFICATIONS, implement

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


@implement("sparse_mla", "cuda")
def sparse_mla(
    query: Tensor,
    latent: Tensor,
    slots: Tensor,
    scale: float,
    value_dim: int,
    fixed: bool = False,
    page_table: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    rope = latent.shape[2] - value_dim
    if query.dtype == torch.float64 or query.dtype != latent.dtype or rope == 0:
        return SPECIFICATIONS["sparse_mla"](query, latent, slots, scale, value_dim)
    out = query.new_empty((*query.shape[:3], value_dim))
    if page_table is not None and rows is not None and not fixed:
        own = row_attention.Row(slots, page_table, rows, latent.shape[1])
        if row_attention.serves(query, value_dim, own):
            row_attention.attend(query, latent, own, out, scale)
            return out
    attend, given, tile = runs_of(query, latent, scale, value_dim)
    attend_by_runs(attend, given, query, slots, out, tile, fixed)
    return out


def runs_of(
    query: Tensor, latent: Tensor, scale: float, value_dim: int
) -> tuple[Callable[..., None], tuple[Any, ...], Tile]:
    """What `attend_by_runs` takes first, and its tile: a kernel for plain rows and such queries."""
    if many_heads.serves(query, value_dim):
        return many_heads.attend, (many_heads.plain_rows(latent), scale), many_heads.TILE
    return _attend, (latent, scale), tile_for(query)


def tile_for(query: Tensor) -> Tile:
    """query [.., H, D]"""
    if query.element_size() > 2:
        return WIDE
    return MANY_HEADS if query.shape[-2] > 32 else FEW_HEADS


def _attend(run: Run, tile: Tile, latent: Tensor, scale: float) -> None:
    (count, heads, dim), value, lanes = run.query.shape, run.out.shape[2], run.slots.shape[1]
    block = max(16, triton.next_power_of_2(value))
    _attend_part[(count, run.parts, triton.cdiv(heads, tile.heads))](
        run.query, latent, run.slots, run.out, run.mixed, run.high, run.total, scale, lanes, heads,
        run.lanes,
        VALUE=value, ROPE=dim - value, PIECE=min(tile.piece, block),
        BLOCK_R=max(16, triton.next_power_of_2(dim - value)),
        SPAN=triton.next_power_of_2(run.lanes), STEP=tile.step, HEADS=tile.heads,
        WHOLE=run.parts == 1, STAGES=tile.stages, CHAINED=CHAINED, num_warps=tile.warps,
        launch_pdl=CHAINED,
    )  # fmt: skip
