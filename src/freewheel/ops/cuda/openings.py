# SPDX-License-Identifier: Apache-2.0
"""The beginning of sparse attention, in two launches, or three.

One for the parts of the joined projection. Then, side by side: each token's query latent, its
latent's store and its index key, which add up their parts as they read them, and the index gates,
whose weights wait in registers. Of more tokens the gates are projected first, by matrix units, and
their parts are added up where they would else be projected.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.cache import latent_row
from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.latents import norm_row
from freewheel.ops.cuda.linear import (
    INPUTS,
    MOST_HELD,
    OUTPUTS,
    STAGES,
    TOKENS,
    project_few,
    streams,
)
from freewheel.ops.cuda.parts import load_sum
from freewheel.ops.cuda.quantised import Given, Tile, fill_parts, shares, tile_of
from freewheel.ops.cuda.wide_products import wide_parts
from freewheel.ops.openings import open_latents_apart
from freewheel.ops.registry import implement

BLOCK = 128
"""Rows and inputs that one scale covers."""

GATES = 1024
"""Gates that one program adds up."""


@triton.jit
def _open(
    parts, cache, query_out, query_weight, key_out, latent_weight, positions, table, slots, eps,
    x, gate_weight, gate_parts, gates, tokens, I_, G, pairs,
    WIDTH: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, SPAN: tl.constexpr,
    INTERLEAVED: tl.constexpr, PARTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, INPUTS: tl.constexpr, HELD: tl.constexpr,
    STAGES: tl.constexpr, GATE_PARTS: tl.constexpr, GATES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. 3 * tokens - 1: a token's query, latent, key; behind them pairs of gates.

    GATE_PARTS: into how many parts gates are projected; 0: they are yet to be projected.
    """
    program, columns = tl.program_id(0), WIDTH + DIM + RANK + SPAN
    token, part = program // 3, program % 3
    own, pitch = parts + token * columns, tokens * columns
    kind: tl.constexpr = query_out.dtype.element_ty
    if program >= 3 * tokens and GATE_PARTS > 0:
        follow(CHAINED)
        cell = (program - 3 * tokens) * GATES + tl.arange(0, GATES)
        inside = cell < tokens * G
        total = load_sum(gate_parts + cell, inside, tokens * G, tl.float32, GATE_PARTS)
        tl.store(gates + cell, total, mask=inside)
    elif program >= 3 * tokens:
        at = program - 3 * tokens
        project_few(
            x, gate_weight, gates, at % pairs * 2, at // pairs * 4, tokens, I_, G,
            INPUTS, HELD, STAGES, CHAINED,
        )  # fmt: skip
    elif part == 0:
        follow(CHAINED)
        norm_row(own, pitch, query_weight, query_out + token * WIDTH, eps, WIDTH, BLOCK_Q, PARTS)
    elif part == 1:
        follow(CHAINED)
        target = cache + tl.load(slots + token).to(tl.int64) * (RANK + SPAN)
        latent_row(
            own + WIDTH + DIM, pitch, target, latent_weight, tl.load(positions + token), table,
            eps, RANK, SPAN, INTERLEAVED, BLOCK, HALF, PARTS,
        )  # fmt: skip
    else:
        follow(CHAINED)
        lane = tl.arange(0, BLOCK_D)
        value = load_sum(own + WIDTH + lane, lane < DIM, pitch, kind, PARTS)
        tl.store(key_out + token * DIM + lane, value.to(kind), mask=lane < DIM)


@implement("block_open_latents", "cuda")
def block_open_latents(
    cache: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    gate_weight: Tensor,
    query_weight: Tensor,
    latent_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs, inputs = weight.shape
    given = Given(
        x.contiguous(), weight, weight_scale, slots.numel(), outputs, inputs, BLOCK, BLOCK
    )
    tile = _tile(given, cache, gate_weight, fixed)
    place = (positions.contiguous(), rope_table, interleaved, slots.contiguous())
    norms = (query_weight, latent_weight, eps)
    if tile is None:
        own = (x, weight, weight_scale, gate_weight)
        return open_latents_apart(cache, *own, *norms, *place, fixed)
    few = streams(given.x, gate_weight) and not fixed
    few = few or not gate_weight.shape[0]
    gates = None if few else wide_parts(given.x, gate_weight, fixed=fixed)
    # A single part is rounded as it is stored, as `load_sum` rounds several.
    parts = shares(given, tile)[1]
    kind = x.dtype if parts == 1 else torch.float32
    room = x.new_empty((parts, given.tokens, outputs), dtype=kind)
    fill_parts(given, room, tile)
    return _finish(room, gates, cache, given, gate_weight, *norms, *place)


def _tile(given: Given, cache: Tensor, gate_weight: Tensor, fixed: bool) -> Tile | None:
    """None where the steps are left to ops of their own: other dtypes, and very many tokens."""
    x = given.x
    if x.dtype not in (torch.bfloat16, torch.float32) or not given.tokens:
        return None
    if cache.dtype != x.dtype or gate_weight.dtype != torch.float32:
        return None
    if x.is_cuda and x.dtype == torch.float32:
        return None  # float32 is only for the interpreter
    return tile_of(given, fixed)


def _finish(
    room: Tensor,
    gate_parts: Tensor | None,
    cache: Tensor,
    given: Given,
    gate_weight: Tensor,
    query_weight: Tensor,
    latent_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    interleaved: bool,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `block_open_latents`, of parts [P, tokens, N]: float32, or one as x.

    `gate_parts`: float32 [G, tokens, Hi], or None if the gates are yet to be projected.
    """
    lead, tokens, x = given.x.shape[:-1], given.tokens, given.x
    width, rank, span = query_weight.shape[0], latent_weight.shape[0], rope_table.shape[1]
    dim, gated = given.outputs - width - rank - span, gate_weight.shape[0]
    query, key = x.new_empty((*lead, width)), x.new_empty((*lead, dim))
    gates = gate_weight.new_empty((*lead, gated))
    pairs = triton.cdiv(gated, OUTPUTS)
    behind = pairs * triton.cdiv(tokens, TOKENS)
    if gate_parts is not None:
        behind = triton.cdiv(tokens * gated, GATES)
    _open[(3 * tokens + behind,)](
        room, cache, query, query_weight, key, latent_weight, positions, rope_table, slots, eps,
        x, gate_weight, gates if gate_parts is None else gate_parts, gates, tokens, given.inputs,
        gated, max(1, pairs),
        WIDTH=width, DIM=dim, RANK=rank, SPAN=span, INTERLEAVED=interleaved, PARTS=room.shape[0],
        BLOCK_Q=triton.next_power_of_2(width), BLOCK_D=triton.next_power_of_2(max(1, dim)),
        BLOCK=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(span // 2),
        INPUTS=INPUTS, HELD=min(MOST_HELD, given.inputs // INPUTS), STAGES=STAGES,
        GATE_PARTS=0 if gate_parts is None else gate_parts.shape[0], GATES=GATES,
        CHAINED=CHAINED, num_warps=8, launch_pdl=CHAINED,
    )  # fmt: skip
    return query, key, gates
