# SPDX-License-Identifier: Apache-2.0
"""Masks of the host: kept with the letter, and one look at the row's last tokens for each logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.registry import implement

BLOCK = 2048
"""Logits of one program, and mask words that one program stores."""


@triton.jit
def _keep(rows, words, mask_lens, masks, stride, BITS, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    letter = words + b.to(tl.int64) * stride
    length = tl.load(letter)
    if length != 0:
        row = tl.load(rows + b).to(tl.int64)
        lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = lane < BITS
        tl.store(masks + row * BITS + lane, tl.load(letter + 1 + lane, mask=live), mask=live)
        if tl.program_id(1) == 0:
            tl.store(mask_lens + row, length)


@implement("apply_masks", "cuda")
def apply_masks(rows: Tensor, words: Tensor, mask_lens: Tensor, masks: Tensor) -> None:
    bits = masks.shape[1]
    _keep[(rows.shape[0], triton.cdiv(bits, BLOCK))](
        rows, words, mask_lens, masks, words.stride(0), bits, BLOCK=BLOCK
    )


@triton.jit
def _guide(
    logits, positions, rows, tokens, computed_lens, uses, prompt_lens, grammars, grammar_states,
    mask_lens, masks, out, held, C, T, V, BITS, steps, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + query // C).to(tl.int64)
    position = tl.load(positions + query)
    own = grammars + row * 5
    state = tl.load(grammar_states + row)
    used = (tl.load(uses + row) & 16 != 0) & (tl.load(own + 2) == -4)
    guided = used & (state == -4)
    if used & (state == -1):
        first = tl.maximum(tl.load(computed_lens + row), tl.load(prompt_lens + row))
        trigger = tl.load(own + 3)
        for place in range(tl.maximum(first, position - steps + 1), tl.minimum(position + 1, T)):
            guided = guided | (tl.load(tokens + row * T + place) == trigger)
    there = tl.load(mask_lens + row) == position + 1
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = lane < V
    value = tl.load(logits + query * V + lane, mask=live, other=0.0)
    if guided & there:
        bits = tl.load(masks + row * BITS + lane // 32, mask=live, other=0)
        value = tl.where((bits >> (lane % 32)) & 1 != 0, value, float("-inf"))
    tl.store(out + query * V + lane, value, mask=live)
    if tl.program_id(1) == 0:
        tl.store(held + query, (guided & (there == 0)).to(tl.int8))


@implement("guide", "cuda")
def guide(
    logits: Tensor,
    positions: Tensor,
    rows: Tensor,
    tokens: Tensor,
    computed_lens: Tensor,
    uses: Tensor,
    prompt_lens: Tensor,
    grammars: Tensor,
    grammar_states: Tensor,
    mask_lens: Tensor,
    masks: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    logits, positions = logits.contiguous(), positions.contiguous()
    batch, choices, vocabulary = logits.shape
    held = torch.empty((batch, choices), dtype=torch.int8, device=logits.device)
    out = torch.empty_like(logits)
    _guide[(batch * choices, triton.cdiv(vocabulary, BLOCK))](
        logits, positions, rows, tokens, computed_lens, uses, prompt_lens, grammars,
        grammar_states, mask_lens, masks, out, held, choices, tokens.shape[1], vocabulary,
        masks.shape[1], steps, BLOCK=BLOCK,
    )  # fmt: skip
    return out, held.view(torch.bool)
