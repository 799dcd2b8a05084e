# SPDX-License-Identifier: Apache-2.0
"""Grammars: a few dependent loads for each drafted token, then one look-up for each logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.registry import implement

BLOCK = 2048
"""Logits of one program, and cells that one program stores."""


@triton.jit
def _store(words, cells, tables, BLOCK: tl.constexpr):
    first, count = tl.load(words).to(tl.int64), tl.load(words + 1)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < count
    tl.store(tables + first + lane, tl.load(cells + lane, mask=live), mask=live)


@implement("store_table", "cuda")
def store_table(words: Tensor, tables: Tensor) -> None:
    cells = words[2:].view(torch.int16)
    _store[(triton.cdiv(cells.shape[0], BLOCK),)](words, cells, tables, BLOCK=BLOCK)


@triton.jit
def _walk(state, line, first, last, grammar, tables, V):
    """The state after the tokens `first` to `last` of the row that begins at `line`."""
    base = tl.load(grammar).to(tl.int64)
    classes, start = tl.load(grammar + 1), tl.load(grammar + 2)
    trigger = tl.load(grammar + 3)
    for place in range(first, last + 1):
        token = tl.load(line + place)
        within = state >= 0
        kind = tl.load(tables + base + token, mask=within, other=0).to(tl.int64)
        cell = base + V + state.to(tl.int64) * (classes + 1) + kind
        following = tl.load(tables + cell, mask=within, other=0).to(tl.int32)
        following = tl.where(following < 0, -3, following)
        begun = tl.where(classes > 0, start, -2)
        waited = tl.where((state == -1) & (token == trigger), begun, state)
        state = tl.where(within, following, waited)
    return state


@triton.jit
def _states(
    positions, rows, tokens, computed_lens, uses, prompt_lens, grammars, grammar_states, tables,
    out, C, T, V,
):  # fmt: skip
    query = tl.program_id(0)
    row = tl.load(rows + query // C).to(tl.int64)
    if tl.load(uses + row) & 16 != 0:
        first = tl.maximum(tl.load(computed_lens + row), tl.load(prompt_lens + row))
        state = _walk(
            tl.load(grammar_states + row), tokens + row * T, first,
            tl.minimum(tl.load(positions + query), T - 1),
            grammars + row * 5, tables, V,
        )  # fmt: skip
        tl.store(out + query, state)


@triton.jit
def _constrain(
    logits, positions, rows, uses, stop_ids, grammars, states, tables, out, C, V,
    STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + query // C).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = lane < V
    value = tl.load(logits + query * V + lane, mask=live, other=0.0)
    if tl.load(uses + row) & 16 != 0:
        state, own = tl.load(states + query), grammars + row * 5
        base, classes = tl.load(own).to(tl.int64), tl.load(own + 1)
        trigger, budget = tl.load(own + 3), tl.load(own + 4)
        stops = lane < 0
        for nth in tl.static_range(STOPS):
            stops = stops | (lane == tl.load(stop_ids + row * STOPS + nth))
        if state >= 0:
            line = tables + base + V + state.to(tl.int64) * (classes + 1)
            kind = tl.load(tables + base + lane, mask=live, other=0)
            may = tl.load(line + kind, mask=live, other=-1) >= 0
            may = may | (stops & (tl.load(line + classes) > 0))
            value = tl.where(may, value, float("-inf"))
        if state == -1:
            forced = (budget >= 0) & (tl.load(positions + query) + 1 >= budget)
            free = (stops == 0) | (classes == 0) | (budget == -2)
            kept = tl.where(forced, lane == trigger, free)
            value = tl.where(kept, value, float("-inf"))
    tl.store(out + query * V + lane, value, mask=live)


@implement("constrain", "cuda")
def constrain(
    logits: Tensor,
    positions: Tensor,
    rows: Tensor,
    tokens: Tensor,
    computed_lens: Tensor,
    uses: Tensor,
    stop_ids: Tensor,
    prompt_lens: Tensor,
    grammars: Tensor,
    grammar_states: Tensor,
    tables: Tensor,
    steps: int,
) -> Tensor:
    del steps
    logits, positions = logits.contiguous(), positions.contiguous()
    batch, choices, vocabulary = logits.shape
    states = torch.empty((batch, choices), dtype=torch.int32, device=logits.device)
    out = torch.empty_like(logits)
    _states[(batch * choices,)](
        positions, rows, tokens, computed_lens, uses, prompt_lens, grammars, grammar_states,
        tables, states, choices, tokens.shape[1], vocabulary, num_warps=1,
    )  # fmt: skip
    _constrain[(batch * choices, triton.cdiv(vocabulary, BLOCK))](
        logits, positions, rows, uses, stop_ids, grammars, states, tables, out, choices,
        vocabulary, STOPS=stop_ids.shape[1], BLOCK=BLOCK,
    )  # fmt: skip
    return out


@triton.jit
def _follow(
    tokens, rows, starts, accept_lens, uses, prompt_lens, grammars, grammar_states, tables, T, V,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows + b).to(tl.int64)
    start, count = tl.load(starts + b), tl.load(accept_lens + b)
    if (tl.load(uses + row) & 16 != 0) & (count > 0):
        first = tl.maximum(start, tl.load(prompt_lens + row))
        state = _walk(
            tl.load(grammar_states + row), tokens + row * T, first, start + count - 1,
            grammars + row * 5, tables, V,
        )  # fmt: skip
        tl.store(grammar_states + row, state)


@implement("follow", "cuda")
def follow(
    tokens: Tensor,
    rows: Tensor,
    start: Tensor,
    accept_lens: Tensor,
    uses: Tensor,
    prompt_lens: Tensor,
    grammars: Tensor,
    grammar_states: Tensor,
    tables: Tensor,
    vocabulary: int,
    steps: int,
) -> None:
    del steps
    _follow[(rows.shape[0],)](
        tokens, rows, start, accept_lens, uses, prompt_lens, grammars, grammar_states, tables,
        tokens.shape[1], vocabulary, num_warps=1,
    )  # fmt: skip
