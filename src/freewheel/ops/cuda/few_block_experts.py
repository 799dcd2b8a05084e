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

from freewheel.ops.cuda.chain import CHAINED, release, wait
from freewheel.ops.cuda.gating import gate
from freewheel.ops.cuda.short_down import MOST_BLOCKS, hold_first, short_down
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


GATE_UP, TALL_GATE_UP = Tile(32, 4, 3), Tile(64, 4, 3)
"""Outputs are rows of gates and ups together; tall where that leaves two programs a processor."""

ENOUGH = 264
"""That is so many on an H200."""

OUTPUTS, ROUNDS, STAGES = 32, 8, 4
"""Of one warp of the down projection: at a time, how often, and how many times ahead."""


class BlockWeights(NamedTuple):
    """FP8 weights of experts and their scales, as `block_experts` takes them."""

    gate_up: Tensor  # uint8 [E, 2I, H]
    gate_up_scale: Tensor  # float32 [E, 2 * ceil(I / 128), ceil(H / 128)]
    down: Tensor  # uint8 [E, H, I]
    down_scale: Tensor  # float32 [E, ceil(H / 128), ceil(I / 128)]


@triton.jit
def load_ids(at, mask, other: tl.constexpr):
    """Choices of experts, also in front of the wait for the kernel before.

    That one began when they were complete: it waits before it lets another begin. They are read
    past the first cache, which may hold what lay there earlier.
    """
    return tl.load(at, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def find_expert(ids, slot, pairs, PAIRS: tl.constexpr):
    """(expert, earlier pairs that have it, its place) of the pair `slot`.

    Places are those of pairs sorted by expert: the first of an expert's is its own. A choice of
    nobody (-1) is never the first.
    """
    lane = tl.arange(0, PAIRS)
    every = load_ids(ids + lane, lane < pairs, 0x7FFFFFFF)
    expert = tl.load(ids + slot, cache_modifier=".cg")
    earlier = tl.sum(((every == expert) & (lane < slot)).to(tl.int32), 0)
    earlier += (expert < 0).to(tl.int32)
    return expert, earlier, tl.sum((every < expert).to(tl.int32), 0)


@triton.jit
def _few_gate_up(
    x, weight, scale, shared, shared_scale, ids, shares, inner, limit, count, pairs,
    H: tl.constexpr, INNER: tl.constexpr, EXTRA: tl.constexpr, TOP_K: tl.constexpr,
    PAIRS: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, CLAMP: tl.constexpr,
    ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    release(CHAINED)  # what comes next may read the choices, and the first of its own weights
    slot, row = tl.program_id(1), tl.arange(0, OUTPUTS)
    at = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
    n = tl.minimum(tl.program_id(0) * (OUTPUTS // 2) + row // 2, INNER - 1)
    token, nth = tl.arange(0, TOKENS), tl.arange(0, CHOICES)
    grid: tl.constexpr = (INNER + STEP - 1) // STEP
    columns: tl.constexpr = (H + STEP - 1) // STEP
    if slot < pairs:
        expert, earlier, place = find_expert(ids, slot, pairs, PAIRS)
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
        sides = total.reshape((OUTPUTS // 2, 2, TOKENS)).permute((0, 2, 1))
        gate_value, up_value = tl.split(sides)
        value = gate(gate_value, up_value, limit, CLAMP) * share[None, :]
        value = tl.where(chosen[None, :], value, 0.0).to(inner.dtype.element_ty)
        target = inner + (place * count + token)[None, :] * INNER + at[:, None]
        tl.store(target, value, mask=(token < count)[None, :] & (at < INNER)[:, None])


@triton.jit
def _few_down(
    inner, weight, scale, shared, shared_scale, ids, parts, count, pairs,
    H: tl.constexpr, INNER: tl.constexpr, EXTRA: tl.constexpr, TOP_K: tl.constexpr,
    PAIRS: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr, ROUNDS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    slot, token, nth = tl.program_id(1), tl.arange(0, TOKENS), tl.arange(0, CHOICES)
    columns: tl.constexpr = (INNER + STEP - 1) // STEP
    rows: tl.constexpr = (H + STEP - 1) // STEP
    if slot < pairs:
        expert, earlier, place = find_expert(ids, slot, pairs, PAIRS)
        there = (token < count)[:, None] & (nth < TOP_K)[None, :]
        choice = load_ids(ids + token[:, None] * TOP_K + nth[None, :], there, -2)
        chosen = tl.max((choice == expert).to(tl.int32), 1) > 0
        own, width = weight + expert.to(tl.int64) * H * INNER, INNER
        factors, pitch = scale + expert.to(tl.int64) * rows * columns, columns
    else:
        earlier, place, chosen = 0, slot, token < count
        own, width = shared + (slot - pairs) * INNER, EXTRA * INNER
        factors = shared_scale + (slot - pairs) * INNER // STEP
        pitch = (EXTRA * INNER + STEP - 1) // STEP
    even: tl.constexpr = INNER == STEP * SLICES
    if earlier == 0:
        codes, factor = hold_first(
            own, width, factors, pitch, H, INNER, OUTPUTS, SLICES, ROUNDS, STEP, even
        )
        release(CHAINED)
        wait(CHAINED)
        at = (place * count + token).to(tl.int64)
        short_down(
            inner + at * INNER, own, width, factors, pitch, parts + at * H, chosen,
            tl.full((TOKENS,), 1.0, tl.float32), codes, factor, H, INNER,
            TOKENS, OUTPUTS, SLICES, ROUNDS, STAGES, STEP, even, ASM,
        )  # fmt: skip
    else:
        release(CHAINED)
        wait(CHAINED)


@triton.jit
def _sum_spots(
    parts, ids, out, count, pairs, H,
    EXTRA: tl.constexpr, TOP_K: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """An expert's place holds the sum of a token's choices of it: the first of them takes it."""
    token, lane = tl.program_id(0), tl.arange(0, PAIRS)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    release(CHAINED)
    every = load_ids(ids + lane, lane < pairs, 0x7FFFFFFF)
    wait(CHAINED)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.max(tl.where(lane == pair, every, -1), 0)
        again = (every == expert) & (lane < pair) & (lane // TOP_K == token)
        place = tl.sum((every < expert).to(tl.int32), 0)
        source = parts + (place * count + token).to(tl.int64) * H + h
        first = (tl.max(again.to(tl.int32), 0) == 0) & (expert >= 0)
        total += tl.load(source, mask=(h < H) & first, other=0)
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


def gate_up_tile(width: int, experts: int) -> Tile:
    """For at most so many experts, shared ones included, of such a width."""
    tall = triton.cdiv(width, TALL_GATE_UP.outputs // 2) * experts >= ENOUGH
    return TALL_GATE_UP if tall else GATE_UP


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
    sizes = {
        "H": hidden, "INNER": width, "EXTRA": extra, "TOP_K": top_k, "TOKENS": MOST_TOKENS,
        "CHOICES": triton.next_power_of_2(top_k), "STEP": STEP, "ASM": fast,
        "PAIRS": triton.next_power_of_2(pairs), "CHAINED": CHAINED, "launch_pdl": CHAINED,
    }  # fmt: skip
    up = gate_up_tile(width, pairs + extra)
    _few_gate_up[(triton.cdiv(width, up.outputs // 2), pairs + extra)](
        x, own.gate_up, own.gate_up_scale, behind.gate_up, behind.gate_up_scale, ids, weights,
        inner, 0.0 if limit is None else limit, tokens, pairs, **sizes,
        OUTPUTS=up.outputs, SLICES=up.slices, STAGES=up.stages,
        CLAMP=limit is not None, num_warps=up.slices,
    )  # fmt: skip
    _few_down[(triton.cdiv(hidden, OUTPUTS * ROUNDS), pairs + extra)](
        inner, own.down, own.down_scale, behind.down, behind.down_scale, ids, parts,
        tokens, pairs, **sizes, OUTPUTS=OUTPUTS, ROUNDS=ROUNDS, STAGES=STAGES,
        SLICES=triton.next_power_of_2(triton.cdiv(width, STEP)), num_warps=1,
    )  # fmt: skip
    _sum_spots[(tokens, triton.cdiv(hidden, 1024))](
        parts, ids, out, tokens, pairs, hidden, EXTRA=extra, TOP_K=top_k,
        PAIRS=triton.next_power_of_2(pairs), BLOCK=1024, CHAINED=CHAINED, launch_pdl=CHAINED,
    )  # fmt: skip
    return out
