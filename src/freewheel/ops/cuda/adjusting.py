# SPDX-License-Identifier: Apache-2.0
"""Adjusted logits: count what the rows hold, change every logit once, then the few listed ones.

The counts lie in scratch memory that each round makes anew: bit 30 of a token's word says that the
row holds it, the bits below how often its output does. They cover the tokens up to a row's first
query; those between that and a later query, which are drafts, are compared one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.registry import implement

BLOCK = 2048
"""Logits of one program."""


@triton.jit
def _apply(
    rows, words, prompt_lens, penalties, grammars, grammar_states, bias_ids, bias_values,
    bad_words, allowed, stride,
    BIASES: tl.constexpr, BANNED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b serves batch row b: its words, in order, go to the row's columns."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    letter = words + tl.program_id(0) * stride
    lane = tl.arange(0, BLOCK)
    if tl.load(letter) != 0:
        tl.store(prompt_lens + row, tl.load(letter + 1))
        three = lane < 3
        values = tl.load(letter + 2 + lane, mask=three, other=0).to(tl.float32, bitcast=True)
        tl.store(penalties + row * 3 + lane, values, mask=three)
        five = lane < 5
        tl.store(grammars + row * 5 + lane, tl.load(letter + 5 + lane, mask=five), mask=five)
        begun = tl.where(tl.load(letter + 6) > 0, tl.load(letter + 7), -2)
        tl.store(grammar_states + row, tl.where(tl.load(letter + 8) >= 0, -1, begun))
        for at in range(0, BIASES, BLOCK):
            live = at + lane < BIASES
            ids = tl.load(letter + 10 + at + lane, mask=live, other=0)
            tl.store(bias_ids + row * BIASES + at + lane, ids, mask=live)
            values = tl.load(letter + 10 + BIASES + at + lane, mask=live, other=0)
            values = values.to(tl.float32, bitcast=True)
            tl.store(bias_values + row * BIASES + at + lane, values, mask=live)
        for at in range(0, BANNED, BLOCK):
            live = at + lane < BANNED
            tokens = tl.load(letter + 10 + 2 * BIASES + at + lane, mask=live, other=0)
            tl.store(bad_words + row * BANNED + at + lane, tokens, mask=live)
        for at in range(0, BITS, BLOCK):
            live = at + lane < BITS
            bits = tl.load(letter + 10 + 2 * BIASES + BANNED + at + lane, mask=live, other=0)
            tl.store(allowed + row * BITS + at + lane, bits, mask=live)


@implement("apply_adjustments", "cuda")
def apply_adjustments(
    rows: Tensor,
    words: Tensor,
    prompt_lens: Tensor,
    penalties: Tensor,
    grammars: Tensor,
    grammar_states: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    bad_words: Tensor,
    allowed: Tensor,
) -> None:
    _apply[(rows.shape[0],)](
        rows, words, prompt_lens, penalties, grammars, grammar_states, bias_ids, bias_values,
        bad_words, allowed, words.stride(0), BIASES=bias_ids.shape[1],
        BANNED=bad_words.stride(0), BITS=allowed.shape[1], BLOCK=1024,
    )  # fmt: skip


@triton.jit
def _count(
    positions, rows, tokens, uses, prompt_lens, counts, C, T, V, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + b).to(tl.int64)
    end = tl.minimum(tl.load(positions + b * C) + 1, T)
    at = tl.program_id(1) * BLOCK
    if (tl.load(uses + row) & 1 != 0) & (at < end):
        place = at + tl.arange(0, BLOCK)
        live = place < end
        token = tl.load(tokens + row * T + place, mask=live, other=0)
        live = live & (token >= 0) & (token < V)
        output = live & (place >= tl.load(prompt_lens + row))
        there = tl.full((BLOCK,), 1073741824, tl.int32)
        tl.atomic_or(counts + b * V + token, there, mask=live)
        tl.atomic_add(counts + b * V + token, tl.full((BLOCK,), 1, tl.int32), mask=output)


@triton.jit
def _change(
    logits, positions, rows, tokens, uses, prompt_lens, penalties, allowed, counts, out,
    C, T, V, BITS, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    b = query // C
    row = tl.load(rows + b).to(tl.int64)
    used = tl.load(uses + row)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = lane < V
    value = tl.load(logits + query * V + lane, mask=live, other=0.0)
    if used & 1 != 0:
        word = tl.load(counts + b * V + lane, mask=live, other=0)
        there, count = (word & 1073741824) != 0, word & 1073741823
        first, last = tl.load(positions + b * C), tl.load(positions + query)
        behind = tl.load(prompt_lens + row)
        for ahead in range(1, CHOICES):
            place = first + ahead
            if (place <= last) & (place < T):
                same = lane == tl.load(tokens + row * T + place)
                there = there | same
                count += (same & (place >= behind)).to(tl.int32)
        presence, frequency = tl.load(penalties + row * 3), tl.load(penalties + row * 3 + 1)
        repetition = tl.load(penalties + row * 3 + 2)
        scaled = tl.where(value > 0, value / repetition, value * repetition)
        value = tl.where(there, scaled, value)
        value = value - frequency * count.to(tl.float32)
        value = value - presence * (count > 0).to(tl.float32)
    if used & 4 != 0:
        bits = tl.load(allowed + row * BITS + lane // 32, mask=live, other=0)
        value = tl.where((bits >> (lane % 32)) & 1 != 0, value, float("-inf"))
    tl.store(out + query * V + lane, value, mask=live)


@triton.jit
def _change_listed(
    positions, rows, tokens, uses, prompt_lens, bias_ids, bias_values, bad_words, out,
    C, T, V, BIASES: tl.constexpr, WORDS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + query // C).to(tl.int64)
    used = tl.load(uses + row)
    line = out + query * V
    if used & 2 != 0:
        lane = tl.arange(0, BLOCK)
        token = tl.load(bias_ids + row * BIASES + lane, mask=lane < BIASES, other=-1)
        bias = tl.load(bias_values + row * BIASES + lane, mask=token >= 0, other=0.0)
        value = tl.load(line + token, mask=token >= 0, other=0.0)
        tl.store(line + token, value + bias, mask=token >= 0)
    tl.debug_barrier()  # a banned token may have a bias
    if used & 8 != 0:
        word = tl.arange(0, MANY)
        inside = word < WORDS
        own = bad_words + (row * WORDS + word) * LENGTH
        position, behind = tl.load(positions + query), tl.load(prompt_lens + row)
        match = inside
        for back in range(1, LENGTH):
            want = tl.load(own + LENGTH - 1 - back, mask=inside, other=-1)
            place = position + 1 - back
            within = (place >= behind) & (place >= 0) & (place < T)
            seen = tl.load(tokens + row * T + place, mask=within, other=-2)
            match = match & ((want < 0) | (want == seen))
        last = tl.load(own + LENGTH - 1, mask=inside, other=-1)
        tl.store(line + last, float("-inf"), mask=match & (last >= 0))


@implement("adjust", "cuda")
def adjust(
    logits: Tensor,
    positions: Tensor,
    rows: Tensor,
    tokens: Tensor,
    uses: Tensor,
    prompt_lens: Tensor,
    penalties: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    bad_words: Tensor,
    allowed: Tensor,
) -> Tensor:
    logits, positions = logits.contiguous(), positions.contiguous()
    (batch, choices, vocabulary), width = logits.shape, tokens.shape[1]
    counts = torch.zeros((batch, vocabulary), dtype=torch.int32, device=logits.device)
    out = torch.empty_like(logits)
    _count[(batch, triton.cdiv(width, BLOCK))](
        positions, rows, tokens, uses, prompt_lens, counts, choices, width, vocabulary, BLOCK=BLOCK,
    )  # fmt: skip
    _change[(batch * choices, triton.cdiv(vocabulary, BLOCK))](
        logits, positions, rows, tokens, uses, prompt_lens, penalties, allowed, counts, out,
        choices, width, vocabulary, allowed.shape[1], CHOICES=choices, BLOCK=BLOCK,
    )  # fmt: skip
    _change_listed[(batch * choices,)](
        positions, rows, tokens, uses, prompt_lens, bias_ids, bias_values, bad_words, out,
        choices, width, vocabulary, BIASES=bias_ids.shape[1], WORDS=bad_words.shape[1],
        LENGTH=bad_words.shape[2], BLOCK=triton.next_power_of_2(bias_ids.shape[1]),
        MANY=triton.next_power_of_2(bad_words.shape[1]),
    )  # fmt: skip
    return out
