# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts for a few tokens, in two launches.

There are at least as many (token, choice) pairs as chosen experts, so each pair gets the programs
of an expert, and pairs whose expert an earlier pair has end at once. An expert computes all tokens,
since a matrix tile holds them all, and writes zeros for those that did not choose it. Shared
experts come behind the pairs, as many as are of the width of one. The warps of a program split its
inputs, and their sums are added in order at the end.

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

from freewheel.ops.cuda.chain import CHAINED, release, wait

MOST_TOKENS = 16
"""The height of a matrix tile."""


class Few(NamedTuple):
    """Of one program: outputs, inputs of a warp at a time, warps, and loads ahead."""

    outputs: int
    inputs: int
    warps: int
    stages: int


GATE_UP = {torch.bfloat16: Few(32, 64, 4, 3), torch.float32: Few(16, 16, 4, 2)}
DOWN = {torch.bfloat16: Few(16, 64, 4, 7), torch.float32: Few(16, 16, 4, 2)}


@triton.jit
def _few_gate_up(
    x, weight, shared, ids, shares, places, inner, count, pairs,
    H: tl.constexpr, INNER: tl.constexpr, EXTRA: tl.constexpr, TOP_K: tl.constexpr,
    PAIRS: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    SHARE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    slot, n = tl.program_id(1), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token, nth, lane = tl.arange(0, TOKENS), tl.arange(0, CHOICES), tl.arange(0, PAIRS)
    wait(CHAINED)
    if slot < pairs:
        expert = tl.load(ids + slot)
        every = tl.load(ids + lane, mask=lane < pairs, other=0x7FFFFFFF)
        earlier = tl.sum(((every == expert) & (lane < slot)).to(tl.int32), 0)
        place = tl.sum((every < expert).to(tl.int32), 0) + earlier
        if tl.program_id(0) == 0:
            tl.store(places + place, tl.where(earlier > 0, -1, expert))
        earlier += (expert < 0).to(tl.int32)
        there = (token < count)[:, None] & (nth < TOP_K)[None, :]
        at = token[:, None] * TOP_K + nth[None, :]
        mine = tl.load(ids + at, mask=there, other=-1) == expert
        share = tl.load(shares + at, mask=mine, other=0).to(tl.float32)
        gates, ups = weight + expert.to(tl.int64) * 2 * INNER * H, INNER * H
        chosen, share = tl.max(mine.to(tl.int32), 1) > 0, tl.sum(share, 1)
    else:
        earlier, place = 0, slot
        gates, ups = shared + (slot - pairs).to(tl.int64) * INNER * H, EXTRA * INNER * H
        chosen, share = token < count, tl.full((TOKENS,), 1.0, tl.float32)
    if earlier == 0:
        k = tl.arange(0, SPLIT)[:, None] * SHARE + tl.arange(0, SHARE)[None, :]
        own = gates + tl.minimum(n, INNER - 1)[None, None, :] * H + k[:, :, None]
        source = x + token.to(tl.int64)[None, :, None] * H + k[:, None, :]
        live = (token < count)[None, :, None]
        gate = tl.zeros((SPLIT, TOKENS, OUTPUTS), tl.float32)
        up = tl.zeros((SPLIT, TOKENS, OUTPUTS), tl.float32)
        for at in tl.range(0, H, SPLIT * SHARE, num_stages=STAGES):
            part = tl.load(source + at, mask=live & (at + k < H)[:, None, :], other=0)
            inside = (at + k < H)[:, :, None]
            gate = tl.dot(part, tl.load(own + at, mask=inside, other=0), gate, "ieee")
            up = tl.dot(part, tl.load(own + ups + at, mask=inside, other=0), up, "ieee")
        release(CHAINED)
        gate, up = tl.sum(gate, 0), tl.sum(up, 0)
        value = gate / (1 + tl.exp(-gate)) * up * share[:, None]
        value = tl.where(chosen[:, None], value, 0.0).to(inner.dtype.element_ty)
        target = inner + (place * count + token)[:, None] * INNER + n[None, :]
        tl.store(target, value, mask=(token < count)[:, None] & (n < INNER)[None, :])


@triton.jit
def _few_down(
    inner, weight, shared, places, out, count, pairs,
    H: tl.constexpr, INNER: tl.constexpr, EXTRA: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, SHARE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    n, token = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, TOKENS)
    row = tl.minimum(n, H - 1)[None, None, :]
    k = tl.arange(0, SPLIT)[:, None] * SHARE + tl.arange(0, SHARE)[None, :]
    steps: tl.constexpr = (INNER + SPLIT * SHARE - 1) // (SPLIT * SHARE)
    wait(CHAINED)
    total = tl.zeros((SPLIT, TOKENS, OUTPUTS), tl.float32)
    for step in tl.range(0, (pairs + EXTRA) * steps, num_stages=STAGES):
        place, at = step // steps, step % steps * (SPLIT * SHARE)
        expert = tl.load(places + place, mask=place < pairs, other=0)
        inside = (at + k < INNER) & (expert >= 0)
        own = weight + expert.to(tl.int64) * H * INNER
        own = tl.where(place < pairs, own, shared + (place - pairs) * INNER)
        stride = tl.where(place < pairs, INNER, EXTRA * INNER)
        source = inner + (place * count + token)[None, :, None] * INNER + at + k[:, None, :]
        live = (token < count)[None, :, None]
        part = tl.load(source, mask=live & inside[:, None, :], other=0)
        w = tl.load(own + row * stride + at + k[:, :, None], mask=inside[:, :, None], other=0)
        total = tl.dot(part, w, total, input_precision="ieee")
    release(CHAINED)
    target = out + token.to(tl.int64)[:, None] * H + n[None, :]
    value = tl.sum(total, 0).to(out.dtype.element_ty)
    tl.store(target, value, mask=(token < count)[:, None] & (n < H)[None, :])


def shared_parts(down: Tensor, shared_down: Tensor | None) -> int | None:
    """How many routed experts wide the shared one is; None if that is no whole number."""
    if shared_down is None:
        return 0
    parts, rest = divmod(shared_down.shape[1], down.shape[2])
    return None if rest else parts


def few_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    extra: int,
) -> Tensor:
    """`grouped_experts` of contiguous x, ids and weights of at most MOST_TOKENS tokens.

    `extra`: `shared_parts`.
    """
    (_, hidden, width), top_k = down.shape, ids.shape[-1]
    pairs = ids.numel()
    out, tokens = torch.empty_like(x), pairs // top_k
    inner = x.new_empty((pairs + extra, tokens, width))
    places = torch.empty((pairs,), dtype=torch.int32, device=x.device)
    shared_gate_up = gate_up if shared_gate_up is None else shared_gate_up
    shared_down = down if shared_down is None else shared_down
    up, low = GATE_UP[x.dtype], DOWN[x.dtype]
    _few_gate_up[(triton.cdiv(width, up.outputs), pairs + extra)](
        x, gate_up, shared_gate_up, ids, weights, places, inner, tokens, pairs,
        H=hidden, INNER=width, EXTRA=extra, TOP_K=top_k, PAIRS=triton.next_power_of_2(pairs),
        CHOICES=triton.next_power_of_2(top_k), TOKENS=MOST_TOKENS, OUTPUTS=up.outputs,
        SHARE=up.inputs, SPLIT=up.warps, STAGES=up.stages, CHAINED=CHAINED,
        num_warps=up.warps, launch_pdl=CHAINED,
    )  # fmt: skip
    _few_down[(triton.cdiv(hidden, low.outputs),)](
        inner, down, shared_down, places, out, tokens, pairs,
        H=hidden, INNER=width, EXTRA=extra, TOKENS=MOST_TOKENS, OUTPUTS=low.outputs,
        SHARE=low.inputs, SPLIT=low.warps, STAGES=low.stages, CHAINED=CHAINED,
        num_warps=low.warps, launch_pdl=CHAINED,
    )  # fmt: skip
    return out
