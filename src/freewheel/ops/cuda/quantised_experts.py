# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts over FP8 blocks that reads each chosen expert once.

Four launches, whatever the routing: list the tiles (an expert, and up to `TOKENS` of its pairs of
token and choice); gate and up projections of each tile; the down projection; and the sum over a
token's experts, in the order of its choices. The list has no gaps, so the launches are as large as
the experts that can be chosen, not as all experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow, release, wait
from freewheel.ops.cuda.few_block_experts import BlockWeights
from freewheel.ops.cuda.gating import gate
from freewheel.ops.cuda.short_down import MOST_BLOCKS, short_down
from freewheel.ops.cuda.streaming import few_tokens, many_tokens

STEP = 128
"""Rows and inputs that one scale covers."""

ROUNDS = 8
"""Tiles of outputs of one program of a short down projection."""


class Tile(NamedTuple):
    """Of one program: outputs, warps, warps that share the inputs (0: many tokens), loads ahead."""

    outputs: int
    warps: int
    slices: int
    stages: int


class Shape(NamedTuple):
    """Tiles of the gate and up projections (outputs are rows of both) and of the down one."""

    tokens: int
    gate_up: Tile
    down: Tile


FEW = Shape(8, Tile(32, 2, 2, 4), Tile(32, 4, 4, 3))
SOME = Shape(16, Tile(32, 2, 2, 3), Tile(32, 4, 4, 3))
MANY = Shape(64, Tile(128, 4, 0, 3), Tile(128, 4, 0, 2))
MANY_FLOAT32 = Shape(32, Tile(32, 4, 0, 2), Tile(32, 4, 0, 2))


def shape_for(pairs: int, experts: int, fast: bool) -> Shape:
    """By how many tokens an expert has when they spread evenly."""
    if pairs <= 4 * experts:
        return FEW
    if pairs <= 16 * experts:
        return SOME
    return MANY if fast else MANY_FLOAT32


@triton.jit
def _list_tiles(
    ids, experts, lanes, pairs, MOST,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program e lists the pairs of expert e, in their order, behind the tiles of lower experts."""
    follow(CHAINED)
    own, each, lane = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for at in range(0, pairs, BLOCK):
        inside = at + lane < pairs
        expert = tl.load(ids + at + lane, mask=inside, other=0)
        counts += tl.histogram(expert, BLOCK_E, mask=inside)
    tiles = (counts + TOKENS - 1) // TOKENS
    first = tl.sum(tl.where(each < own, tiles, 0), 0)
    total = tl.sum(tiles, 0)
    count = tl.sum(tl.where(each == own, counts, 0), 0)
    mine = (count + TOKENS - 1) // TOKENS
    for tile in range(first, first + mine):
        tl.store(experts + tile, own)
    rest = tl.arange(0, TOKENS)
    tl.store(lanes + first * TOKENS + count + rest, -1, mask=count + rest < mine * TOKENS)
    rank = 0
    for at in range(0, pairs, BLOCK):
        is_mine = tl.load(ids + at + lane, mask=at + lane < pairs, other=-1) == own
        place = rank + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(lanes + first * TOKENS + place, at + lane, mask=is_mine)
        rank += tl.sum(is_mine.to(tl.int32), 0)
    for tile in range(total + own, MOST, tl.num_programs(0)):
        tl.store(experts + tile, -1)


@triton.jit
def _gate_up(
    x, weight, scale, experts, lanes, inner, limit, TOP_K, H, INNER,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    STEP: tl.constexpr, EVEN: tl.constexpr, CLAMP: tl.constexpr, ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    pair = tl.load(lanes + tile * TOKENS + tl.arange(0, TOKENS))
    if expert >= 0:
        live = pair >= 0
        row = tl.arange(0, OUTPUTS)  # gate and up of the same output lie side by side
        n = tl.minimum(tl.program_id(0) * (OUTPUTS // 2) + row // 2, INNER - 1)
        weight_row = weight + (expert * 2 * INNER + row % 2 * INNER + n) * H
        grid, columns = tl.cdiv(INNER, STEP), tl.cdiv(H, STEP)
        scale_row = scale + (expert * 2 * grid + row % 2 * grid + n // STEP) * columns
        x_row = x + (pair // TOP_K).to(tl.int64) * H
        at = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        if SLICES:
            total = few_tokens(
                weight_row, x_row, live, scale_row, 0, H,
                OUTPUTS, TOKENS, SLICES, STEP, STAGES, EVEN, ASM,
            )  # fmt: skip
            sides = total.reshape((OUTPUTS // 2, 2, TOKENS)).permute((0, 2, 1))
            gate_value, up_value = tl.split(sides)
            target = inner + pair.to(tl.int64)[None, :] * INNER + at[:, None]
            mask = live[None, :] & (at < INNER)[:, None]
        else:
            total = many_tokens(
                weight_row, x_row, live, scale_row, 0, H,
                OUTPUTS, TOKENS, STEP, STAGES, False, EVEN, ASM,
            )  # fmt: skip
            gate_value, up_value = tl.split(total.reshape((TOKENS, OUTPUTS // 2, 2)))
            target = inner + pair.to(tl.int64)[:, None] * INNER + at[None, :]
            mask = live[:, None] & (at < INNER)[None, :]
        release(CHAINED)
        value = gate(gate_value, up_value, limit, CLAMP)
        tl.store(target, value.to(inner.dtype.element_ty), mask=mask)


@triton.jit
def _down(
    inner, weight, scale, experts, lanes, shares, parts, H, INNER,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    STEP: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    pair = tl.load(lanes + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    if expert >= 0:
        live = pair >= 0
        at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        n = tl.minimum(at, H - 1)
        weight_row = weight + (expert * H + n) * INNER
        scale_row = scale + (expert * tl.cdiv(H, STEP) + n // STEP) * tl.cdiv(INNER, STEP)
        share = tl.load(shares + pair, mask=live, other=0).to(tl.float32)
        if SLICES:
            total = few_tokens(
                weight_row, inner + pair * INNER, live, scale_row, 0, INNER,
                OUTPUTS, TOKENS, SLICES, STEP, STAGES, EVEN, ASM,
            )  # fmt: skip
            release(CHAINED)
            target, mask = (
                parts + pair[None, :] * H + at[:, None],
                live[None, :] & (at < H)[:, None],
            )
            tl.store(target, total * share[None, :], mask=mask)
        else:
            total = many_tokens(
                weight_row, inner + pair * INNER, live, scale_row, 0, INNER,
                OUTPUTS, TOKENS, STEP, STAGES, False, EVEN, ASM,
            )  # fmt: skip
            release(CHAINED)
            target, mask = (
                parts + pair[:, None] * H + at[None, :],
                live[:, None] & (at < H)[None, :],
            )
            tl.store(target, total * share[:, None], mask=mask)


@triton.jit
def _down_short(
    inner, weight, scale, experts, lanes, shares, parts, H, INNER,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr, ROUNDS: tl.constexpr,
    STAGES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """As `_down` for at most STEP * SLICES inputs."""
    wait(CHAINED)
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    pair = tl.load(lanes + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    if expert >= 0:
        live = pair >= 0
        columns = tl.cdiv(INNER, STEP)
        short_down(
            inner + pair * INNER, weight + expert * H * INNER, INNER,
            scale + expert * tl.cdiv(H, STEP) * columns, columns, parts + pair * H, live,
            tl.load(shares + pair, mask=live, other=0).to(tl.float32), H, INNER,
            TOKENS, OUTPUTS, SLICES, ROUNDS, STAGES, STEP, EVEN, ASM,
        )  # fmt: skip
        release(CHAINED)


@triton.jit
def _sum_choices(
    parts, out, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(parts + (token * TOP_K + k) * H + h, mask=h < H, other=0)
    tl.store(out + token * H + h, total.to(out.dtype.element_ty), mask=h < H)


class Plan(NamedTuple):
    """Tiles of a routing: each tile's expert (-1: none) and its pairs (-1: none)."""

    experts: Tensor  # int32 [most]
    lanes: Tensor  # int32 [most * tokens]


def list_tiles(ids: Tensor, experts: int, tokens: int) -> Plan:
    """The tiles of `ids` int32 [..., top_k], contiguous; at most as many as there can be."""
    pairs = ids.numel()
    most = min(experts, pairs) + pairs // tokens
    plan = Plan(ids.new_empty((most,)), ids.new_empty((most * tokens,)))
    block = min(1024, triton.next_power_of_2(pairs))
    _list_tiles[(experts,)](
        ids, *plan, pairs, most, TOKENS=tokens, BLOCK=block,
        BLOCK_E=triton.next_power_of_2(experts), CHAINED=CHAINED,
        num_warps=1 if block <= 128 else 4, launch_pdl=CHAINED,
    )  # fmt: skip
    return plan


def sum_choices(parts: Tensor, out: Tensor, top_k: int) -> None:
    """parts float32 [pairs, H] summed over each token's pairs into out [..., H]."""
    hidden = parts.shape[1]
    grid = (parts.shape[0] // top_k, triton.cdiv(hidden, 1024))
    _sum_choices[grid](
        parts, out, hidden, TOP_K=top_k, BLOCK=1024, CHAINED=CHAINED, launch_pdl=CHAINED
    )


def tiled_block_experts(
    x: Tensor, own: BlockWeights, ids: Tensor, weights: Tensor, limit: float | None, fast: bool
) -> Tensor:
    """`block_experts` without shared ones, of contiguous x, ids and weights."""
    (experts, hidden, width), top_k = own.down.shape, ids.shape[-1]
    out, pairs = torch.empty_like(x), ids.numel()
    if not pairs:
        return out
    shape = shape_for(pairs, experts, fast)
    plan = list_tiles(ids, experts, shape.tokens)
    inner = x.new_empty((pairs, width))
    parts = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
    up = shape.gate_up
    _gate_up[(triton.cdiv(width, up.outputs // 2), plan.experts.shape[0])](
        x, own.gate_up, own.gate_up_scale, *plan, inner, 0.0 if limit is None else limit, top_k,
        hidden, width, TOKENS=shape.tokens, OUTPUTS=up.outputs, SLICES=up.slices,
        STAGES=up.stages, STEP=STEP, EVEN=hidden % (STEP * max(1, up.slices)) == 0,
        CLAMP=limit is not None, ASM=fast, CHAINED=CHAINED, num_warps=up.warps, launch_pdl=CHAINED,
    )  # fmt: skip
    _project_down(inner, own, plan, weights, parts, shape, fast)
    sum_choices(parts, out, top_k)
    return out


def _project_down(
    inner: Tensor,
    own: BlockWeights,
    plan: Plan,
    weights: Tensor,
    parts: Tensor,
    shape: Shape,
    fast: bool,
) -> None:
    """inner [pairs, I] times its pair's expert and weight, into parts float32 [pairs, H]."""
    (hidden, width), tiles, low = own.down.shape[1:], plan.experts.shape[0], shape.down
    args = (inner, own.down, own.down_scale, *plan, weights, parts, hidden, width)
    blocks = triton.next_power_of_2(triton.cdiv(width, STEP))
    if low.slices and blocks <= MOST_BLOCKS:
        _down_short[(triton.cdiv(hidden, low.outputs * ROUNDS), tiles)](
            *args, TOKENS=shape.tokens, OUTPUTS=low.outputs, SLICES=blocks, ROUNDS=ROUNDS,
            STAGES=low.stages, STEP=STEP, EVEN=width == blocks * STEP, ASM=fast,
            CHAINED=CHAINED, num_warps=1, launch_pdl=CHAINED,
        )  # fmt: skip
    else:
        _down[(triton.cdiv(hidden, low.outputs), tiles)](
            *args, TOKENS=shape.tokens, OUTPUTS=low.outputs, SLICES=low.slices,
            STAGES=low.stages, STEP=STEP, EVEN=width % (STEP * max(1, low.slices)) == 0, ASM=fast,
            CHAINED=CHAINED, num_warps=low.warps, launch_pdl=CHAINED,
        )  # fmt: skip
