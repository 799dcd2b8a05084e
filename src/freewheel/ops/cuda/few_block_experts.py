# SPDX-License-Identifier: Apache-2.0
"""A mixture of FP8 experts for a few tokens, in two launches, shared experts included.

There are at least as many (token, choice) pairs as chosen experts, so each pair gets the programs
of an expert, and pairs whose expert an earlier pair has end at once. An expert computes all tokens,
since a matrix tile holds them all, and writes zeros for those that did not choose it. Shared
experts come behind the pairs, as many as are of the width of one.

What the gates and ups of an expert give is kept at its place among the pairs sorted by expert, so
that the down projection is one long sum in ascending order of experts: a token's order does not
depend on what its neighbours chose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.gating import gate
from freewheel.ops.cuda.streaming import few_tokens, operand, raw_fp8, true_fp8

MOST_TOKENS = 16
"""Beyond these, reading a token once for each of its own experts is less work."""

STEP = 128
"""Rows and inputs that one scale covers."""


class Tile(NamedTuple):
    """Of one program: outputs, warps (each takes inputs of its own), and loads ahead."""

    outputs: int
    slices: int
    stages: int


GATE_UP, DOWN = Tile(32, 2, 4), Tile(16, 4, 6)
"""Outputs of the first are rows of gates and ups together."""


class BlockWeights(NamedTuple):
    """FP8 weights of experts and their scales, as `block_experts` takes them."""

    gate_up: Tensor  # uint8 [E, 2I, H]
    gate_up_scale: Tensor  # float32 [E, 2 * ceil(I / 128), ceil(H / 128)]
    down: Tensor  # uint8 [E, H, I]
    down_scale: Tensor  # float32 [E, ceil(H / 128), ceil(I / 128)]


@triton.jit
def _few_gate_up(
    x, weight, scale, shared, shared_scale, ids, shares, places, inner, limit, count, pairs,
    H: tl.constexpr, INNER: tl.constexpr, EXTRA: tl.constexpr, TOP_K: tl.constexpr,
    PAIRS: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, CLAMP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
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
        place = tl.sum((every < expert).to(tl.int32), 0) + earlier
        if tl.program_id(0) == 0:
            tl.store(places + place, tl.where(earlier > 0, -1, expert))
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
        first = (slot - pairs) * INNER
        own, ups = shared + first.to(tl.int64) * H, EXTRA * INNER
        factors, up_factors = shared_scale, (EXTRA * INNER + STEP - 1) // STEP
        block = (first + n) // STEP
    if earlier == 0:
        total = few_tokens(
            own + (row % 2 * ups + n) * H, x + token.to(tl.int64) * H, token < count,
            factors + (row % 2 * up_factors + block) * columns, H,
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
    inner, weight, scale, shared, shared_scale, places, out, count, pairs,
    H: tl.constexpr, INNER: tl.constexpr, EXTRA: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    n, token = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, TOKENS)
    k, part, row = tl.arange(0, STEP), tl.arange(0, SLICES), tl.minimum(n, H - 1)
    columns: tl.constexpr = (INNER + STEP - 1) // STEP
    wide: tl.constexpr = (EXTRA * INNER + STEP - 1) // STEP
    rows: tl.constexpr = (H + STEP - 1) // STEP
    total = tl.zeros((SLICES, OUTPUTS, TOKENS), tl.float32)
    for at in tl.range(0, (pairs + EXTRA) * columns, SLICES, num_stages=STAGES):
        place, column = (at + part) // columns, (at + part) % columns
        routed, behind = place < pairs, place - pairs
        expert = tl.load(places + place, mask=routed, other=0)
        live = (expert >= 0) & (place < pairs + EXTRA)
        k_at = column[:, None] * STEP + k[None, :]
        inside = live[:, None] & (k_at < INNER)
        own = tl.where(routed, weight + expert.to(tl.int64) * H * INNER, shared + behind * INNER)
        stride = tl.where(routed, INNER, EXTRA * INNER)
        codes_at = (
            own[:, None, None] + stride[:, None, None] * row[None, :, None] + k_at[:, None, :]
        )
        codes = tl.load(codes_at, mask=inside[:, None, :], other=0)
        source = inner + (place * count)[:, None, None] * INNER + token[None, None, :] * INNER
        there = inside[:, :, None] & (token < count)[None, None, :]
        value = tl.load(source + k_at[:, :, None], mask=there, other=0)
        grid = tl.where(
            routed, scale + expert.to(tl.int64) * rows * columns,
            shared_scale + behind * INNER // STEP,
        )  # fmt: skip
        pitch = tl.where(routed, columns, wide)
        factor_at = (grid + column)[:, None] + pitch[:, None] * (row // STEP)[None, :]
        factor = tl.load(factor_at, mask=live[:, None], other=0)
        both = tl.dot(raw_fp8(codes, ASM), operand(value, ASM), input_precision="ieee")
        total += both * factor[:, :, None]
    target = out + token.to(tl.int64)[None, :] * H + n[:, None]
    value = true_fp8(tl.sum(total, 0), ASM).to(out.dtype.element_ty)
    tl.store(target, value, mask=(token < count)[None, :] & (n < H)[:, None])


def shared_parts(inner: int, shared_inner: int | None) -> int | None:
    """How many routed experts wide the shared one is; None if it cannot be cut into such parts.

    Parts must begin where blocks do.
    """
    if shared_inner is None:
        return 0
    parts, rest = divmod(shared_inner, inner)
    return None if rest or (parts > 1 and inner % STEP) else parts


def few_block_experts(
    x: Tensor,
    own: BlockWeights,
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
    shared: BlockWeights | None,
    fast: bool,
) -> Tensor:
    """`block_experts` of contiguous x, ids and weights of at most MOST_TOKENS tokens.

    The width of the shared experts, if any, is a multiple of the others': see `shared_parts`.
    """
    (_, hidden, width), top_k, pairs = own.down.shape, ids.shape[-1], ids.numel()
    tokens, extra = pairs // top_k, 0 if shared is None else shared.down.shape[-1] // width
    out, behind = torch.empty_like(x), own if shared is None else shared
    inner = x.new_empty((pairs + extra, tokens, width))
    places = ids.new_empty((pairs,))
    tile = max(8, triton.next_power_of_2(tokens))
    _few_gate_up[(triton.cdiv(width, GATE_UP.outputs // 2), pairs + extra)](
        x, own.gate_up, own.gate_up_scale, behind.gate_up, behind.gate_up_scale, ids, weights,
        places, inner, 0.0 if limit is None else limit, tokens, pairs,
        H=hidden, INNER=width, EXTRA=extra, TOP_K=top_k, PAIRS=triton.next_power_of_2(pairs),
        CHOICES=triton.next_power_of_2(top_k), TOKENS=tile, OUTPUTS=GATE_UP.outputs,
        SLICES=GATE_UP.slices, STEP=STEP, STAGES=GATE_UP.stages, CLAMP=limit is not None,
        ASM=fast, num_warps=GATE_UP.slices,
    )  # fmt: skip
    _few_down[(triton.cdiv(hidden, DOWN.outputs),)](
        inner, own.down, own.down_scale, behind.down, behind.down_scale, places, out, tokens,
        pairs, H=hidden, INNER=width, EXTRA=extra, TOKENS=tile, OUTPUTS=DOWN.outputs,
        SLICES=DOWN.slices, STEP=STEP, STAGES=DOWN.stages, ASM=fast, num_warps=DOWN.slices,
    )  # fmt: skip
    return out
