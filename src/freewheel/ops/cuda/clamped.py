# SPDX-License-Identifier: Apache-2.0
"""Routing by sqrt(softplus) or by the token, and clamped gating. A token's routing is a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda import routing
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.experts import PAIRS, Tile, _down, _sort_pairs, _sum_choices
from freewheel.ops.registry import SPECIFICATIONS, implement

TILES = {
    torch.bfloat16: (Tile(32, 256, 4, 3), Tile(128, 128, 4, 2)),
    torch.float32: (Tile(32, 32, 4, 3), Tile(64, 32, 4, 2)),
}
"""Of the gate and up projections, and of the down projection."""


@triton.jit
def _score(logit):
    """sqrt(log(1 + exp(x))), to the last digits also where exp(x) is far below 1."""
    small = tl.exp(-tl.abs(logit))  # at most 1
    sum_ = 1 + small
    # log1p: what 1 + small rounded away comes back as a factor.
    log = tl.where(sum_ == 1, small, tl.log(sum_) * small / tl.where(sum_ == 1, 1.0, sum_ - 1))
    return tl.sqrt(tl.maximum(logit, 0.0) + log)


@triton.jit
def _store_routes(weights_out, ids_out, token, weights, ids, scale, nth, TOP_K: tl.constexpr):
    weights = weights / (tl.sum(weights, 0) + 1e-20) * scale
    tl.store(weights_out + token * TOP_K + nth, weights, mask=nth < TOP_K)
    tl.store(ids_out + token * TOP_K + nth, ids, mask=nth < TOP_K)


@triton.jit
def _route_best(
    logits, bias, weights_out, ids_out, scale, E,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    expert, nth = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    left = expert < E
    score = _score(tl.load(logits + token * E + expert, mask=left, other=0))
    choice = score + tl.load(bias + expert, mask=left, other=0)
    choice = tl.where(choice == choice, choice, float("-inf"))  # an id is always below E
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        top = tl.max(tl.where(left, choice, float("-inf")), 0)
        winner = tl.min(tl.where(left & (choice == top), expert, BLOCK), 0)
        won = expert == winner
        left = left & (won == 0)
        ids = tl.where(nth == k, winner, ids)
        weights = tl.where(nth == k, tl.sum(tl.where(won, score, 0.0), 0), weights)
    _store_routes(weights_out, ids_out, token, weights, ids, scale, nth, TOP_K)


@implement("route_best", "cuda")
def route_best(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    if logits.dtype != torch.float32:
        return SPECIFICATIONS["route_best"](logits, bias, top_k, scale)
    shape, experts = (*logits.shape[:-1], top_k), logits.shape[-1]
    weights, ids = logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)
    if bias.dtype == torch.float32 and ids.numel() and routing.serves(logits, experts, 1, top_k):
        parts = logits.reshape(1, -1, experts)
        routing.route_by_block(parts, bias, weights, ids, (1, 1), scale, True, True)
    elif ids.numel():
        _route_best[(ids.numel() // top_k,)](
            logits.contiguous(), bias, weights, ids, scale, experts,
            TOP_K=top_k, BLOCK=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(top_k), CHAINED=CHAINED, num_warps=1,
            launch_pdl=CHAINED,
        )  # fmt: skip
    return weights, ids


@triton.jit
def _route_by_token(
    logits, table, tokens, weights_out, ids_out, scale, E,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK_K)
    line = table + tl.load(tokens + token).to(tl.int64) * TOP_K
    ids = tl.load(line + nth, mask=nth < TOP_K, other=0)
    score = _score(tl.load(logits + token * E + ids, mask=nth < TOP_K, other=0))
    score = tl.where(nth < TOP_K, score, 0.0)
    _store_routes(weights_out, ids_out, token, score, ids, scale, nth, TOP_K)


@implement("route_by_token", "cuda")
def route_by_token(
    logits: Tensor, table: Tensor, tokens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if logits.dtype != torch.float32:
        return SPECIFICATIONS["route_by_token"](logits, table, tokens, scale)
    top_k = table.shape[1]
    shape = (*tokens.shape, top_k)
    weights, ids = logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)
    if ids.numel():
        _route_by_token[(tokens.numel(),)](
            logits.contiguous(), table, tokens.contiguous(), weights, ids, scale,
            logits.shape[-1], TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k), CHAINED=CHAINED,
            num_warps=1, launch_pdl=CHAINED,
        )  # fmt: skip
    return weights, ids


@triton.jit
def _clamp_mul(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit); NaN stays."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def _clamped_silu_mul(gate_up, out, total, INNER, limit, BLOCK: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = lane < total
    source = gate_up + (lane // INNER) * 2 * INNER + lane % INNER
    gate = tl.load(source, mask=live, other=0).to(tl.float32)
    up = tl.load(source + INNER, mask=live, other=0).to(tl.float32)
    tl.store(out + lane, _clamp_mul(gate, up, limit).to(out.dtype.element_ty), mask=live)


@implement("clamped_silu_mul", "cuda")
def clamped_silu_mul(gate_up: Tensor, limit: float) -> Tensor:
    if gate_up.dtype == torch.float64:
        return SPECIFICATIONS["clamped_silu_mul"](gate_up, limit)
    gate_up = gate_up.contiguous()
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], inner))
    if out.numel():
        _clamped_silu_mul[(triton.cdiv(out.numel(), 1024),)](
            gate_up, out, out.numel(), inner, limit, BLOCK=1024
        )
    return out


@triton.jit
def _clamped_gate_up(
    x, weight, order, starts, counts, inner, TOP_K, H, INNER, limit,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As the gate and up projections of `grouped_experts`, with the halves clamped."""
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
        value = _clamp_mul(gate, up, limit).to(inner.dtype.element_ty)
        target = inner + place[:, None] * INNER + n[None, :]
        tl.store(target, value, mask=live[:, None] & (n < INNER)[None, :])


@implement("clamped_experts", "cuda")
def clamped_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, limit: float
) -> Tensor:
    if x.dtype == torch.float64 or x.dtype != gate_up.dtype:
        return SPECIFICATIONS["clamped_experts"](x, gate_up, down, ids, weights, limit)
    (experts, hidden, width), top_k = down.shape, ids.shape[-1]
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
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
    _clamped_gate_up[(triton.cdiv(width, up.outputs), experts, tiles)](
        x, gate_up, order, starts, counts, inner, top_k, hidden, width, limit,
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
