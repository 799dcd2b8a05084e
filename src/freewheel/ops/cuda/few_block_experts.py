# SPDX-License-Identifier: Apache-2.0
"""A mixture of FP8 experts for a few tokens, in three launches, shared experts included.

There are at least as many (token, choice) pairs as chosen experts, so each pair gets the programs
of an expert, and pairs whose expert an earlier pair has end at once. An expert computes all tokens,
since a matrix tile holds them all, and writes zeros for those that did not choose it. Shared
experts come behind the pairs, as many as are of the width of one.

What an expert gives is kept at its place among the pairs sorted by expert. The last launch adds up
what each token's choices gave, in their order, so that no sum depends on a token's neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow, release, wait
from freewheel.ops.cuda.gating import gate
from freewheel.ops.cuda.short_down import MOST_BLOCKS, short_down
from freewheel.ops.cuda.streaming import few_tokens

MOST_TOKENS = 8
"""The width of a matrix tile; beyond it, an expert computes its own tokens only."""

STEP = 128
"""Rows and inputs that one scale covers."""


class Tile(NamedTuple):
    """Of one program: outputs, warps (each takes inputs of its own), and loads ahead."""

    outputs: int
    slices: int
    stages: int


GATE_UP = Tile(32, 2, 4)
"""Outputs are rows of gates and ups together."""

OUTPUTS, ROUNDS, STAGES = 32, 8, 3
"""Of one warp of the down projection: at a time, how often, and how many times ahead."""


class BlockWeights(NamedTuple):
    """FP8 weights of experts and their scales, as `block_experts` takes them."""

    gate_up: Tensor  # uint8 [E, 2I, H]
    gate_up_scale: Tensor  # float32 [E, 2 * ceil(I / 128), ceil(H / 128)]
    down: Tensor  # uint8 [E, H, I]
    down_scale: Tensor  # float32 [E, ceil(H / 128), ceil(I / 128)]


@triton.jit
def _few_gate_up(
    x, weight, scale, shared, shared_scale, ids, shares, places, spots, inner, limit, count, pairs,
    H: tl.constexpr, INNER: tl.constexpr, EXTRA: tl.constexpr, TOP_K: tl.constexpr,
    PAIRS: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, CLAMP: tl.constexpr,
    ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    slot, row = tl.program_id(1), tl.arange(0, OUTPUTS)
    at = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
    n = tl.minimum(tl.program_id(0) * (OUTPUTS // 2) + row // 2, INNER - 1)
    token, nth, lane = tl.arange(0, TOKENS), tl.arange(0, CHOICES), tl.arange(0, PAIRS)
    grid: tl.constexpr = (INNER + STEP - 1) // STEP
    columns: tl.constexpr = (H + STEP - 1) // STEP
    if slot < pairs:
        expert = tl.load(ids + slot)
        every = tl.load(ids + lane, mask=lane < pairs, other=0x7FFFFFFF)
        earlier = tl.sum(((every == expert) & (lane < slot)).to(tl.int32), 0)
        first = tl.sum((every < expert).to(tl.int32), 0)
        place = first + earlier
        if tl.program_id(0) == 0:
            tl.store(places + place, tl.where(earlier > 0, -1, expert))
            again = (every == expert) & (lane < slot) & (lane // TOP_K == slot // TOP_K)
            tl.store(spots + slot, tl.where(tl.max(again.to(tl.int32), 0) > 0, -1, first))
        there = (token < count)[:, None] & (nth < TOP_K)[None, :]
        choice = token[:, None] * TOP_K + nth[None, :]
        mine = tl.load(ids + choice, mask=there, other=-1) == expert
        share = tl.sum(tl.load(shares + choice, mask=mine, other=0).to(tl.float32), 1)
        chosen = tl.max(mine.to(tl.int32), 1) > 0
        own, ups = weight + expert.to(tl.int64) * 2 * INNER * H, INNER
        factors, up_factors = scale + expert.to(tl.int64) * 2 * grid * columns, grid
        block = n // STEP
    else:
        earlier, place = 0, slot
        share, chosen = tl.full((TOKENS,), 1.0, tl.float32), token < count
        behind = (slot - pairs) * INNER
        own, ups = shared + behind.to(tl.int64) * H, EXTRA * INNER
        factors, up_factors = shared_scale, (EXTRA * INNER + STEP - 1) // STEP
        block = (behind + n) // STEP
    if earlier == 0:
        total = few_tokens(
            own + (row % 2 * ups + n) * H, x + token.to(tl.int64) * H, token < count,
            factors + (row % 2 * up_factors + block) * columns, 0, H,
            OUTPUTS, TOKENS, SLICES, STEP, STAGES, H % (STEP * SLICES) == 0, ASM,
        )  # fmt: skip
        release(CHAINED)
        sides = total.reshape((OUTPUTS // 2, 2, TOKENS)).permute((0, 2, 1))
        gate_value, up_value = tl.split(sides)
        value = gate(gate_value, up_value, limit, CLAMP) * share[None, :]
        value = tl.where(chosen[None, :], value, 0.0).to(inner.dtype.element_ty)
        target = inner + (place * count + token)[None, :] * INNER + at[:, None]
        tl.store(target, value, mask=(token < count)[None, :] & (at < INNER)[:, None])


@triton.jit
def _few_down(
    inner, weight, scale, shared, shared_scale, ids, places, parts, count, pairs,
    H: tl.constexpr, INNER: tl.constexpr, EXTRA: tl.constexpr, TOP_K: tl.constexpr,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr,
    ROUNDS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    place, token, nth = tl.program_id(1), tl.arange(0, TOKENS), tl.arange(0, CHOICES)
    columns: tl.constexpr = (INNER + STEP - 1) // STEP
    rows: tl.constexpr = (H + STEP - 1) // STEP
    if place < pairs:
        expert = tl.load(places + place)
        there = (token < count)[:, None] & (nth < TOP_K)[None, :]
        choice = tl.load(ids + token[:, None] * TOP_K + nth[None, :], mask=there, other=-2)
        chosen = tl.max((choice == expert).to(tl.int32), 1) > 0
        own, width = weight + expert.to(tl.int64) * H * INNER, INNER
        factors, pitch = scale + expert.to(tl.int64) * rows * columns, columns
    else:
        expert, chosen = 0, token < count
        own, width = shared + (place - pairs) * INNER, EXTRA * INNER
        factors = shared_scale + (place - pairs) * INNER // STEP
        pitch = (EXTRA * INNER + STEP - 1) // STEP
    if expert >= 0:
        at = place * count + token
        short_down(
            inner + at.to(tl.int64) * INNER, own, width, factors, pitch,
            parts + at.to(tl.int64) * H, chosen, tl.full((TOKENS,), 1.0, tl.float32), H, INNER,
            TOKENS, OUTPUTS, SLICES, ROUNDS, STAGES, STEP, INNER == STEP * SLICES, ASM,
        )  # fmt: skip
        release(CHAINED)


@triton.jit
def _sum_spots(
    parts, spots, out, count, pairs, H,
    EXTRA: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    token = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        spot = tl.load(spots + token * TOP_K + k)
        source = parts + (spot * count + token).to(tl.int64) * H + h
        total += tl.load(source, mask=(h < H) & (spot >= 0), other=0)
    for k in tl.static_range(EXTRA):
        source = parts + ((pairs + k) * count + token).to(tl.int64) * H + h
        total += tl.load(source, mask=h < H, other=0)
    tl.store(out + token.to(tl.int64) * H + h, total.to(out.dtype.element_ty), mask=h < H)


def shared_parts(inner: int, shared_inner: int | None) -> int | None:
    """How many routed experts wide the shared one is; None if it cannot be cut into such parts.

    Parts must begin where blocks do.
    """
    if shared_inner is None:
        return 0
    parts, rest = divmod(shared_inner, inner)
    return None if rest or (parts > 1 and inner % STEP) else parts


def takes(tokens: int, inner: int, shared_inner: int | None) -> bool:
    """Whether `few_block_experts` computes so many tokens with experts of such widths."""
    few = 0 < tokens <= MOST_TOKENS and triton.cdiv(inner, STEP) <= MOST_BLOCKS
    return few and shared_parts(inner, shared_inner) is not None


def few_block_experts(
    x: Tensor,
    own: BlockWeights,
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
    shared: BlockWeights | None,
    fast: bool,
) -> Tensor:
    """`block_experts` of what it `takes`; x, ids and weights are contiguous."""
    (_, hidden, width), top_k, pairs = own.down.shape, ids.shape[-1], ids.numel()
    tokens, extra = pairs // top_k, 0 if shared is None else shared.down.shape[-1] // width
    out, behind = torch.empty_like(x), own if shared is None else shared
    inner = x.new_empty((pairs + extra, tokens, width))
    parts = torch.empty((pairs + extra, tokens, hidden), dtype=torch.float32, device=x.device)
    places, spots = ids.new_empty((2, pairs))
    sizes = {
        "H": hidden, "INNER": width, "EXTRA": extra, "TOP_K": top_k, "TOKENS": MOST_TOKENS,
        "CHOICES": triton.next_power_of_2(top_k), "STEP": STEP, "ASM": fast,
        "CHAINED": CHAINED, "launch_pdl": CHAINED,
    }  # fmt: skip
    _few_gate_up[(triton.cdiv(width, GATE_UP.outputs // 2), pairs + extra)](
        x, own.gate_up, own.gate_up_scale, behind.gate_up, behind.gate_up_scale, ids, weights,
        places, spots, inner, 0.0 if limit is None else limit, tokens, pairs, **sizes,
        PAIRS=triton.next_power_of_2(pairs), OUTPUTS=GATE_UP.outputs, SLICES=GATE_UP.slices,
        STAGES=GATE_UP.stages, CLAMP=limit is not None, num_warps=GATE_UP.slices,
    )  # fmt: skip
    _few_down[(triton.cdiv(hidden, OUTPUTS * ROUNDS), pairs + extra)](
        inner, own.down, own.down_scale, behind.down, behind.down_scale, ids, places, parts,
        tokens, pairs, **sizes, OUTPUTS=OUTPUTS, ROUNDS=ROUNDS, STAGES=STAGES,
        SLICES=triton.next_power_of_2(triton.cdiv(width, STEP)), num_warps=1,
    )  # fmt: skip
    _sum_spots[(tokens, triton.cdiv(hidden, 1024))](
        parts, spots, out, tokens, pairs, hidden, EXTRA=extra, TOP_K=top_k, BLOCK=1024,
        CHAINED=CHAINED, launch_pdl=CHAINED,
    )  # fmt: skip
    return out
