# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts over FP8 blocks that reads each chosen expert once.

Four launches, whatever the routing: list the tiles (an expert, and up to `TOKENS` of its pairs of
token and choice); gate and up projections of each tile; the down projection; and the sum over a
token's experts, in the order of its choices. The list has no gaps, so the launches are as large as
the experts that can be chosen, not as all experts. Where tiles are small, shared experts run in the
same launches, in parts as wide as a routed one, whose tiles stand in front.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow, release, wait
from freewheel.ops.cuda.few_block_experts import BlockWeights, shared_parts
from freewheel.ops.cuda.gating import gate
from freewheel.ops.cuda.native import Kernel, lacking
from freewheel.ops.cuda.short_down import MOST_BLOCKS, hold_first, short_down
from freewheel.ops.cuda.streaming import few_tokens, many_tokens

STEP = 128
"""Rows and inputs that one scale covers."""

MOST_WIDE = 64
"""Tokens up to which what an expert gives stays in float32 until it is added up."""

ROUNDS = 8
"""Tiles of outputs of one program of a short down projection."""


class Tile(NamedTuple):
    """Of one program: outputs, warps, warps that share the inputs (0: many tokens), loads ahead."""

    outputs: int
    warps: int
    slices: int
    stages: int


class Shape(NamedTuple):
    """Tiles of the gate and up projections (outputs are rows of both) and of the down one.

    `wide`: what an expert gives stays in float32 until it is added up.
    """

    tokens: int
    gate_up: Tile
    down: Tile
    wide: bool = True


FEW = Shape(8, Tile(32, 2, 2, 4), Tile(32, 4, 4, 3))
SOME = Shape(16, Tile(32, 2, 2, 3), Tile(32, 4, 4, 3))
MANY = Shape(64, Tile(128, 4, 0, 3), Tile(128, 4, 0, 2))
MANY_FLOAT32 = Shape(32, Tile(32, 4, 0, 2), Tile(32, 4, 0, 2))


def shape_for(pairs: int, top_k: int, experts: int, fast: bool, fixed: bool) -> Shape:
    """By how many tokens an expert has when they spread evenly.

    `fixed`: of those that give a token the same bits, whatever the number of tokens.
    """
    tile = _tile_for(pairs, experts, fast, fixed)
    # Of many tokens sums are more than the L2 cache holds beside weights.
    return tile._replace(wide=fixed or pairs <= MOST_WIDE * top_k)


def _tile_for(pairs: int, experts: int, fast: bool, fixed: bool) -> Shape:
    if pairs <= 4 * experts:
        return FEW
    if pairs <= 16 * experts or fixed:
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
        expert = tl.load(ids + at + lane, mask=at + lane < pairs, other=-1)
        counts += tl.histogram(tl.maximum(expert, 0), BLOCK_E, mask=expert >= 0)
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
def _read_tile(
    experts, lanes, tile, pairs, count, TOP_K,
    TOKENS: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """(expert, pairs, tokens) of a tile, int64; the tiles of EXTRA shared parts stand in front.

    A shared part is the expert -2, -3, ..; its pairs stand behind all others, one for each token.
    """
    lane = tl.arange(0, TOKENS)
    across = tl.cdiv(count, TOKENS)
    if tile < EXTRA * across:
        part = tile // across
        token = tile % across * TOKENS + lane
        pair = tl.where(token < count, pairs + part * count + token, -1)
        expert = -2 - part
    else:
        tile -= EXTRA * across
        expert = tl.load(experts + tile, cache_modifier=".cg")
        pair = tl.load(lanes + tile * TOKENS + lane, cache_modifier=".cg")
        token = pair // TOP_K
    return expert.to(tl.int64), pair.to(tl.int64), token.to(tl.int64)


@triton.jit
def _gate_up(
    x, weight, scale, shared, shared_scale, experts, lanes, inner, limit, pairs, count,
    TOP_K, H, INNER,
    EXTRA: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, CLAMP: tl.constexpr,
    ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    expert, pair, token = _read_tile(
        experts, lanes, tl.program_id(1), pairs, count, TOP_K, TOKENS, EXTRA
    )
    if expert != -1:
        live = pair >= 0
        row = tl.arange(0, OUTPUTS)  # gate and up of the same output lie side by side
        n = tl.minimum(tl.program_id(0) * (OUTPUTS // 2) + row // 2, INNER - 1).to(tl.int64)
        columns = tl.cdiv(H, STEP)
        if expert >= 0:
            own, factors = weight + expert * 2 * INNER * H, scale
            ups, grid = INNER, tl.cdiv(INNER, STEP)
            factors += expert * 2 * grid * columns
        else:
            n += (-2 - expert) * INNER
            own, factors = shared, shared_scale
            ups, grid = EXTRA * INNER, tl.cdiv(EXTRA * INNER, STEP)
        weight_row = own + (row % 2 * ups + n) * H
        scale_row = factors + (row % 2 * grid + n // STEP) * columns
        x_row = x + token * H
        at = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        if SLICES:
            total = few_tokens(
                weight_row, x_row, live, scale_row, 0, H,
                OUTPUTS, TOKENS, SLICES, STEP, STAGES, EVEN, ASM,
            )  # fmt: skip
            sides = total.reshape((OUTPUTS // 2, 2, TOKENS)).permute((0, 2, 1))
            gate_value, up_value = tl.split(sides)
            target = inner + pair[None, :] * INNER + at[:, None]
            mask = live[None, :] & (at < INNER)[:, None]
        else:
            total = many_tokens(
                weight_row, x_row, live, scale_row, 0, H,
                OUTPUTS, TOKENS, STEP, STAGES, False, EVEN, ASM,
            )  # fmt: skip
            gate_value, up_value = tl.split(total.reshape((TOKENS, OUTPUTS // 2, 2)))
            target = inner + pair[:, None] * INNER + at[None, :]
            mask = live[:, None] & (at < INNER)[None, :]
        release(CHAINED)
        value = gate(gate_value, up_value, limit, CLAMP)
        tl.store(target, value.to(inner.dtype.element_ty), mask=mask)


@triton.jit
def _place_down(
    expert, weight, scale, shared, shared_scale, H, INNER,
    EXTRA: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """An expert's, or a shared part's, weights and scales, and how far apart their rows are."""
    if expert >= 0:
        own, width, pitch = weight + expert * H * INNER, INNER, tl.cdiv(INNER, STEP)
        factors = scale + expert * tl.cdiv(H, STEP) * pitch
    else:
        before = (-2 - expert) * INNER
        own, width, pitch = shared + before, EXTRA * INNER, tl.cdiv(EXTRA * INNER, STEP)
        factors = shared_scale + before // STEP
    return own, width, factors, pitch


@triton.jit
def _down(
    inner, weight, scale, shared, shared_scale, experts, lanes, shares, parts, pairs, count, H,
    INNER,
    EXTRA: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    expert, pair, _ = _read_tile(experts, lanes, tl.program_id(1), pairs, count, 1, TOKENS, EXTRA)
    if expert != -1:
        live = pair >= 0
        at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        n = tl.minimum(at, H - 1)
        own, width, factors, pitch = _place_down(
            expert, weight, scale, shared, shared_scale, H, INNER, EXTRA, STEP
        )
        weight_row, scale_row = own + n.to(tl.int64) * width, factors + n // STEP * pitch
        share = tl.load(shares + pair, mask=live & (pair < pairs), other=1).to(tl.float32)
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
    inner, weight, scale, shared, shared_scale, experts, lanes, shares, parts, pairs, count, H,
    INNER,
    EXTRA: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr,
    ROUNDS: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """As `_down` for at most STEP * SLICES inputs.

    The list was complete before the gate and up projections let this kernel begin (`chain`).
    """
    expert, pair, _ = _read_tile(experts, lanes, tl.program_id(1), pairs, count, 1, TOKENS, EXTRA)
    if expert != -1:
        live = pair >= 0
        own, width, factors, pitch = _place_down(
            expert, weight, scale, shared, shared_scale, H, INNER, EXTRA, STEP
        )
        codes, factor = hold_first(
            own, width, factors, pitch, H, INNER, OUTPUTS, SLICES, ROUNDS, STEP, EVEN
        )
        wait(CHAINED)
        share = tl.load(shares + pair, mask=live & (pair < pairs), other=1).to(tl.float32)
        short_down(
            inner + pair * INNER, own, width, factors, pitch, parts + pair * H, live, share,
            codes, factor, H, INNER, TOKENS, OUTPUTS, SLICES, ROUNDS, STAGES, STEP, EVEN, ASM,
        )  # fmt: skip
        release(CHAINED)
    else:
        wait(CHAINED)


@triton.jit
def _sum_choices(
    parts, ids, out, H, pairs, count,
    TOP_K: tl.constexpr, EXTRA: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        some = tl.load(ids + token * TOP_K + k, cache_modifier=".cg") >= 0
        total += tl.load(parts + (token * TOP_K + k) * H + h, mask=(h < H) & some, other=0)
    for k in tl.static_range(EXTRA):
        total += tl.load(parts + (pairs + k * count + token) * H + h, mask=h < H, other=0)
    tl.store(out + token * H + h, total.to(out.dtype.element_ty), mask=h < H)


LIST = Kernel("list_tiles", "pppii")

LISTING, MOST_PAIRS, MOST_EXPERTS = 512, 2048, 512
"""Threads of the one block that lists tiles, of pairs and experts up to these."""


class Plan(NamedTuple):
    """Tiles of a routing: each tile's expert (-1: none) and its pairs (-1: none)."""

    experts: Tensor  # int32 [most]
    lanes: Tensor  # int32 [most * tokens]


def list_tiles(ids: Tensor, experts: int, tokens: int) -> Plan:
    """The tiles of `ids` int32 [..., top_k], contiguous; at most as many as there can be."""
    pairs = ids.numel()
    most = min(experts, pairs) + pairs // tokens
    plan = Plan(ids.new_empty((most,)), ids.new_empty((most * tokens,)))
    if pairs <= MOST_PAIRS and experts % 2 == 0 and experts <= MOST_EXPERTS and lacking() is None:
        rounds = triton.next_power_of_2(triton.cdiv(pairs, LISTING))
        sizes = {"EXPERTS": experts, "ROUNDS": rounds, "TOKENS": tokens}
        LIST.launch(1, LISTING, 36 * experts + 32, ids, *plan, pairs, most, **sizes)
        return plan
    block = min(1024, triton.next_power_of_2(pairs))
    _list_tiles[(experts,)](
        ids, *plan, pairs, most, TOKENS=tokens, BLOCK=block,
        BLOCK_E=triton.next_power_of_2(experts), CHAINED=CHAINED,
        num_warps=1 if block <= 128 else 4, launch_pdl=CHAINED,
    )  # fmt: skip
    return plan


def sum_choices(parts: Tensor, ids: Tensor, out: Tensor, extra: int = 0) -> None:
    """parts float [pairs + extra * tokens, H], each token's summed in float32 into out [..., H].

    Those of choices of nobody (-1) in ids int32 [..., top_k] are not read.
    """
    hidden, top_k = parts.shape[1], ids.shape[-1]
    tokens = parts.shape[0] // (top_k + extra)
    _sum_choices[(tokens, triton.cdiv(hidden, 1024))](
        parts, ids, out, hidden, tokens * top_k, tokens, TOP_K=top_k, EXTRA=extra, BLOCK=1024,
        CHAINED=CHAINED, launch_pdl=CHAINED,
    )  # fmt: skip


def tiled_block_experts(
    x: Tensor,
    own: BlockWeights,
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
    shared: BlockWeights | None,
    fast: bool,
    shape: Shape,
) -> Tensor:
    """`block_experts` of contiguous x, ids and weights; `shared` only if it `takes_shared`."""
    (experts, hidden, width), top_k = own.down.shape, ids.shape[-1]
    out, pairs = torch.empty_like(x), ids.numel()
    if not pairs:
        return out
    tokens = pairs // top_k
    extra = 0 if shared is None else shared.down.shape[1] // width
    plan = list_tiles(ids, experts, shape.tokens)
    inner = x.new_empty((pairs + extra * tokens, width))
    kind = torch.float32 if shape.wide else x.dtype
    parts = torch.empty((pairs + extra * tokens, hidden), dtype=kind, device=x.device)
    up, behind = shape.gate_up, own if shared is None else shared
    tiles = plan.experts.shape[0] + extra * triton.cdiv(tokens, shape.tokens)
    _gate_up[(triton.cdiv(width, up.outputs // 2), tiles)](
        x, own.gate_up, own.gate_up_scale, behind.gate_up, behind.gate_up_scale, *plan, inner,
        0.0 if limit is None else limit, pairs, tokens, top_k, hidden, width, EXTRA=extra,
        TOKENS=shape.tokens, OUTPUTS=up.outputs, SLICES=up.slices, STAGES=up.stages, STEP=STEP,
        EVEN=hidden % (STEP * max(1, up.slices)) == 0, CLAMP=limit is not None, ASM=fast,
        CHAINED=CHAINED, num_warps=up.warps, launch_pdl=CHAINED,
    )  # fmt: skip
    down = (inner, own.down, own.down_scale, behind.down, behind.down_scale, *plan, weights, parts)
    _project_down((*down, pairs, tokens, hidden, width), tiles, extra, shape, fast)
    sum_choices(parts, ids, out, extra)
    return out


def takes_shared(shape: Shape, inner: int, shared_inner: int) -> bool:
    """Whether shared experts of such width run in the tiles of others, where those are small."""
    return shape.gate_up.slices > 0 and shared_parts(inner, shared_inner) is not None


def _project_down(
    args: tuple[Tensor | int, ...], tiles: int, extra: int, shape: Shape, fast: bool
) -> None:
    """inner [pairs, I] times its pair's expert and weight, into parts float [pairs, H]."""
    hidden, width, low = int(args[-2]), int(args[-1]), shape.down
    blocks = triton.next_power_of_2(triton.cdiv(width, STEP))
    if low.slices and blocks <= MOST_BLOCKS:
        _down_short[(triton.cdiv(hidden, low.outputs * ROUNDS), tiles)](
            *args, EXTRA=extra, TOKENS=shape.tokens, OUTPUTS=low.outputs, SLICES=blocks,
            ROUNDS=ROUNDS, STAGES=low.stages, STEP=STEP, EVEN=width == blocks * STEP, ASM=fast,
            CHAINED=CHAINED, num_warps=1, launch_pdl=CHAINED,
        )  # fmt: skip
    else:
        _down[(triton.cdiv(hidden, low.outputs), tiles)](
            *args, EXTRA=extra, TOKENS=shape.tokens, OUTPUTS=low.outputs, SLICES=low.slices,
            STAGES=low.stages, STEP=STEP, EVEN=width % (STEP * max(1, low.slices)) == 0, ASM=fast,
            CHAINED=CHAINED, num_warps=low.warps, launch_pdl=CHAINED,
        )  # fmt: skip
