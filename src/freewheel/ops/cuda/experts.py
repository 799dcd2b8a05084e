# SPDX-License-Identifier: Apache-2.0
"""Routing, and a mixture of experts that reads each chosen expert once.

Four launches, whatever the routing: sort the (token, choice) pairs by expert; gate and up
projections of each expert's pairs; the down projection; and the sum over a token's experts, in the
order of its choices. Tiles of experts that nobody chose end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.cuda import routing
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.dense import silu_mul
from freewheel.ops.cuda.few_experts import MOST_TOKENS, few_experts, shared_parts
from freewheel.ops.cuda.parts import load_sum
from freewheel.ops.cuda.selection import ordered_key
from freewheel.ops.registry import SPECIFICATIONS, implement

PAIRS = 16
"""Pairs of one tile."""


class Tile(NamedTuple):
    """Of a projection: outputs of one program, inputs at a time, warps, and loads ahead."""

    outputs: int
    inputs: int
    warps: int
    stages: int


TILES = {
    torch.bfloat16: (Tile(32, 256, 4, 3), Tile(128, 128, 4, 2)),
    torch.float32: (Tile(32, 32, 4, 3), Tile(64, 32, 4, 2)),
}
"""Tiles of the gate and up projections, and of the down projection."""


@triton.jit
def _route(
    logits, bias, weights_out, ids_out, scale, E, pitch,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """PARTS: of logits, `pitch` apart, to be added up."""
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    index = group[:, None] * SIZE + member[None, :]
    left = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    logit = load_sum(logits + token * E + index, left, pitch, tl.float32, PARTS)
    score = 1 / (1 + tl.exp(-logit))
    choice = score + tl.load(bias + index, mask=left, other=0)
    low = float("-inf")
    if TOP_GROUPS < GROUPS:
        ranked = tl.where(left, choice, low)
        best = tl.max(ranked, 1)
        at = tl.min(tl.where(ranked == best[:, None], member[None, :], BLOCK_S), 1)
        second = tl.max(tl.where(member[None, :] == at[:, None], low, ranked), 1)
        strength = tl.where(group < GROUPS, best + second, low)
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            free = (kept == 0) & (group < GROUPS)
            top = tl.max(tl.where(free, strength, low), 0)
            winner = tl.min(tl.where(free & (strength == top), group, BLOCK_G), 0)
            kept = kept | (group == winner)
        choice = tl.where(kept[:, None], choice, low)
    # The largest key, then the lowest index that has it: two steps of a warp. 0 is no expert.
    key = tl.reshape(tl.where(left, ordered_key(choice), 0), (BLOCK_G * BLOCK_S,))
    expert = tl.reshape(index, (BLOCK_G * BLOCK_S,))
    nth = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.min(tl.where(key == tl.max(key, 0), expert, 0x7FFFFFFF), 0)
        key = tl.where(expert == best, 0, key)
        ids = tl.where(nth == k, best, ids)
    chosen = load_sum(logits + token * E + ids, nth < TOP_K, pitch, tl.float32, PARTS)
    weights = tl.where(nth < TOP_K, 1 / (1 + tl.exp(-chosen)), 0.0)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(weights_out + token * TOP_K + nth, weights * scale, mask=nth < TOP_K)
    tl.store(ids_out + token * TOP_K + nth, ids, mask=nth < TOP_K)


@implement("route", "cuda")
def route(
    logits: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if logits.dtype != torch.float32:
        return SPECIFICATIONS["route"](logits, bias, n_group, topk_group, top_k, normalise, scale)
    parts, own = (
        logits.reshape(1, -1, bias.shape[0]),
        (n_group, topk_group, top_k, normalise, scale),
    )
    return route_parts(parts, logits.shape[:-1], bias, *own)


def route_parts(
    parts: Tensor,
    lead: torch.Size,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`route` of tokens `lead` by logits that are the sum of parts float32 [P, tokens, E]."""
    (count, tokens, experts), shape = parts.shape, (*lead, top_k)
    weights = parts.new_empty(shape)
    ids = parts.new_empty(shape, dtype=torch.int32)
    if not ids.numel():
        return weights, ids
    if bias.dtype == torch.float32 and routing.serves(parts, experts, n_group, top_k):
        groups = (n_group, min(topk_group, n_group))
        routing.route_by_block(
            parts.contiguous(), bias, weights, ids, groups, scale, normalise, False
        )
    else:
        size = experts // n_group
        _route[(tokens,)](
            parts.contiguous(), bias, weights, ids, scale, experts, tokens * experts,
            GROUPS=n_group, TOP_GROUPS=topk_group, TOP_K=top_k, NORMALISE=normalise, SIZE=size,
            BLOCK_G=triton.next_power_of_2(n_group), BLOCK_S=triton.next_power_of_2(size),
            BLOCK_K=triton.next_power_of_2(top_k), PARTS=count, CHAINED=CHAINED, num_warps=1,
            launch_pdl=CHAINED,
        )  # fmt: skip
    return weights, ids


@triton.jit
def _sort_pairs(ids, order, starts, counts, pairs, BLOCK: tl.constexpr):
    """Program e lists the pairs of expert e behind those of all lower experts, in their order."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    start = 0
    for at in range(0, pairs, BLOCK):
        own = tl.load(ids + at + lane, mask=at + lane < pairs, other=expert)
        start += tl.sum((own < expert).to(tl.int32), 0)
    count = 0
    for at in range(0, pairs, BLOCK):
        mine = tl.load(ids + at + lane, mask=at + lane < pairs, other=-1) == expert
        rank = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + start + rank, at + lane, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(starts + expert, start)
    tl.store(counts + expert, count)


@triton.jit
def _gate_up(
    x, weight, order, starts, counts, inner, TOP_K, H, INNER,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    count = tl.load(counts + expert)
    if tile * PAIRS < count:
        lane = tile * PAIRS + tl.arange(0, PAIRS)
        live = lane < count
        place = (tl.load(starts + expert) + lane).to(tl.int64)
        token = (tl.load(order + place, mask=live, other=0) // TOP_K).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        source = x + token[:, None] * H + k[None, :]
        gates = weight + expert * 2 * INNER * H + n[None, :] * H + k[:, None]
        ups = gates + INNER * H
        gate = tl.zeros((PAIRS, BLOCK_N), tl.float32)
        up = tl.zeros((PAIRS, BLOCK_N), tl.float32)
        for at in range(0, H, BLOCK_K):
            inside = at + k < H
            there = inside[:, None] & (n < INNER)[None, :]
            part = tl.load(source + at, mask=live[:, None] & inside[None, :], other=0)
            gate = tl.dot(part, tl.load(gates + at, mask=there, other=0), gate, "ieee")
            up = tl.dot(part, tl.load(ups + at, mask=there, other=0), up, "ieee")
        value = gate / (1 + tl.exp(-gate)) * up
        target = inner + place[:, None] * INNER + n[None, :]
        tl.store(
            target, value.to(inner.dtype.element_ty), mask=live[:, None] & (n < INNER)[None, :]
        )


@triton.jit
def _down(
    inner, weight, order, starts, counts, shares, out, H, INNER,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    count = tl.load(counts + expert)
    if tile * PAIRS < count:
        lane = tile * PAIRS + tl.arange(0, PAIRS)
        live = lane < count
        place = (tl.load(starts + expert) + lane).to(tl.int64)
        pair = tl.load(order + place, mask=live, other=0).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        source = inner + place[:, None] * INNER + k[None, :]
        downs = weight + expert * H * INNER + n[None, :] * INNER + k[:, None]
        total = tl.zeros((PAIRS, BLOCK_N), tl.float32)
        for at in range(0, INNER, BLOCK_K):
            inside = at + k < INNER
            there = inside[:, None] & (n < H)[None, :]
            part = tl.load(source + at, mask=live[:, None] & inside[None, :], other=0)
            total = tl.dot(part, tl.load(downs + at, mask=there, other=0), total, "ieee")
        total = total * tl.load(shares + pair, mask=live, other=0)[:, None]
        target = out + pair[:, None] * H + n[None, :]
        tl.store(target, total, mask=live[:, None] & (n < H)[None, :])


@triton.jit
def _sum_choices(parts, ids, out, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        some = tl.load(ids + token * TOP_K + k) >= 0
        total += tl.load(parts + (token * TOP_K + k) * H + h, mask=(h < H) & some, other=0)
    tl.store(out + token * H + h, total.to(out.dtype.element_ty), mask=h < H)


@implement("grouped_experts", "cuda")
def grouped_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    shared = (shared_gate_up, shared_down)
    if x.dtype == torch.float64 or x.dtype != gate_up.dtype:
        return SPECIFICATIONS["grouped_experts"](x, gate_up, down, ids, weights, *shared)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    extra = shared_parts(down, shared_down)
    if 0 < ids.numel() <= MOST_TOKENS * ids.shape[-1] and extra is not None:
        return few_experts(x, gate_up, down, ids, weights, *shared, extra)
    out = _many_experts(x, gate_up, down, ids, weights)
    if shared_gate_up is None or shared_down is None:
        return out
    return out + F.linear(silu_mul(F.linear(x, shared_gate_up)), shared_down)


def _many_experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The routed experts alone, for any number of tokens. All arguments are contiguous."""
    (experts, hidden, width), top_k = down.shape, ids.shape[-1]
    out, pairs, tokens = torch.empty_like(x), ids.numel(), ids.numel() // top_k
    if not pairs:
        return out
    order = torch.empty((pairs,), dtype=torch.int32, device=x.device)
    starts, counts = torch.empty((2, experts), dtype=torch.int32, device=x.device)
    inner = x.new_empty((pairs, width))
    parts = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
    block = min(1024, triton.next_power_of_2(pairs))
    _sort_pairs[(experts,)](ids, order, starts, counts, pairs, BLOCK=block, num_warps=1)
    tiles = triton.cdiv(tokens, PAIRS)  # of an expert, at most: a token chooses it once
    up, low = TILES[x.dtype]
    _gate_up[(triton.cdiv(width, up.outputs), experts, tiles)](
        x, gate_up, order, starts, counts, inner, top_k, hidden, width,
        PAIRS=PAIRS, BLOCK_N=up.outputs, BLOCK_K=up.inputs,
        num_warps=up.warps, num_stages=up.stages,
    )  # fmt: skip
    _down[(triton.cdiv(hidden, low.outputs), experts, tiles)](
        inner, down, order, starts, counts, weights, parts, hidden, width,
        PAIRS=PAIRS, BLOCK_N=low.outputs, BLOCK_K=low.inputs,
        num_warps=low.warps, num_stages=low.stages,
    )  # fmt: skip
    _sum_choices[(tokens, triton.cdiv(hidden, 1024))](
        parts, ids, out, hidden, TOP_K=top_k, BLOCK=1024
    )
    return out
