# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in two launches: the best of each block of the vocabulary, then of these.

A key joins a logit, as an integer of the same order, and the token's id, reversed: keys are
distinct, and the largest is the likeliest token, the lowest id among equals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.selection import ordered_key
from freewheel.ops.registry import SPECIFICATIONS, implement

BLOCK = 2048
"""Tokens of one program."""


@triton.jit
def _best_of_block(
    logits, key_out, high_out, mass_out, V, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane = part * BLOCK + tl.arange(0, BLOCK)
    live = lane < V
    value = tl.load(logits + query * V + lane, mask=live, other=float("-inf"))
    value = tl.where(value != value, float("-inf"), value)
    high = tl.max(value, 0)
    safe = tl.where(high == float("-inf"), 0.0, high)
    tl.store(high_out + query * parts + part, high)
    tl.store(mass_out + query * parts + part, tl.sum(tl.exp(value - safe), 0))
    key = (ordered_key(value).to(tl.int64) << 31) | (2147483647 - lane).to(tl.int64)
    key = tl.where(live, key, -1)
    for nth in range(TOP):
        best = tl.max(key, 0)
        tl.store(key_out + (query * parts + part) * TOP + nth, best)
        key = tl.where(key == best, -1, key)


@triton.jit
def _best_of_all(
    logits, targets, keys, highs, masses, out, V, parts,
    TOP: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    part, lane = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    high = tl.load(highs + query * parts + part, mask=part < parts, other=float("-inf"))
    mass = tl.load(masses + query * parts + part, mask=part < parts, other=0.0)
    top = tl.max(high, 0)
    total = tl.log(tl.sum(tl.where(high == float("-inf"), 0.0, mass * tl.exp(high - top)), 0)) + top
    words = out + query * (1 + 2 * TOP)
    own = tl.load(logits + query * V + tl.maximum(tl.load(targets + query), 0))
    own = tl.where(own != own, float("-inf"), own)
    tl.store(words, (own - total).to(tl.int32, bitcast=True))
    key = tl.load(keys + query * parts * TOP + lane, mask=lane < parts * TOP, other=-1)
    for nth in range(TOP):
        best = tl.max(key, 0)
        key = tl.where(key == best, -1, key)
        token = 2147483647 - (best & 2147483647).to(tl.int32)
        value = tl.load(logits + query * V + token, mask=best >= 0, other=float("-inf"))
        value = tl.where(value != value, float("-inf"), value)
        tl.store(words + 1 + nth, tl.where(best >= 0, token, -1))
        tl.store(words + 1 + TOP + nth, (value - total).to(tl.int32, bitcast=True))


@implement("score", "cuda")
def score(logits: Tensor, targets: Tensor, top: int) -> Tensor:
    if logits.dtype != torch.float32:
        return SPECIFICATIONS["score"](logits, targets, top)
    logits, targets = logits.contiguous(), targets.contiguous()
    batch, count, vocabulary = logits.shape
    queries, parts = batch * count, triton.cdiv(vocabulary, BLOCK)
    out = torch.empty((batch, count, 1 + 2 * top), dtype=torch.int32, device=logits.device)
    keys = torch.empty((queries, parts, top), dtype=torch.int64, device=logits.device)
    highs, masses = logits.new_empty((2, queries, parts))
    if not queries:
        return out
    _best_of_block[(queries, parts)](
        logits, keys, highs, masses, vocabulary, TOP=top, BLOCK=BLOCK,
    )  # fmt: skip
    _best_of_all[(queries,)](
        logits, targets, keys, highs, masses, out, vocabulary, parts,
        TOP=top, PARTS=triton.next_power_of_2(parts), BLOCK=triton.next_power_of_2(parts * top),
    )  # fmt: skip
    return out
