# SPDX-License-Identifier: Apache-2.0
"""float32 projections: of a few tokens in plain float32, of more by exact products (below).

A few tokens are too few for matrix units; what counts is that many programs read the weights at
once, so each computes a few outputs, and that they do so early: they hold them in registers while
the kernel in front runs (`chain`). Sums run over `INPUTS` at a time, in a fixed order. More
tokens in bfloat16 are left to `wide_products`, those in float32 to the library.

Error: a few times 2^-24 of the sum of the products' magnitudes, whatever the number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, release, wait
from freewheel.ops.cuda.wide_products import wide_products
from freewheel.ops.registry import SPECIFICATIONS, implement

TOKENS, OUTPUTS, INPUTS, STAGES = 4, 2, 1024, 3
"""Of one program, which names each of them; inputs at a time; loads ahead."""

MOST_HELD = 8
"""How many times so many inputs wait in registers for their tokens; what is left is streamed."""

FEW = 2048
"""Results (tokens times outputs) up to which matrix units do not pay."""

MOST_TOKENS = 64
"""From here on the library's product reads the weights less often."""


@triton.jit
def project_few(
    x, weight, out, output, token, N, I_, O_,
    INPUTS: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of TOKENS tokens, each a vector: what a thread multiplies, it loaded.

    `output`, `token`: the first of them. It waits for the kernel in front itself.
    """
    lane = tl.arange(0, INPUTS)
    even, odd = weight + output * I_ + lane, weight + tl.minimum(output + 1, O_ - 1) * I_ + lane
    held = ()
    for nth in tl.static_range(HELD):
        held = held + (tl.load(even + nth * INPUTS), tl.load(odd + nth * INPUTS))
    release(CHAINED)
    wait(CHAINED)
    x_at, sums = x + token * I_ + lane, ()
    for _ in tl.static_range(8):
        sums = sums + (tl.zeros((INPUTS,), tl.float32),)
    for nth in tl.static_range(HELD):
        fresh = ()
        for t in tl.static_range(4):
            live = (lane >= 0) & (token + t < N)
            value = tl.load(x_at + t * I_ + nth * INPUTS, mask=live, other=0).to(tl.float32)
            fresh = fresh + (sums[2 * t] + value * held[2 * nth],)
            fresh = fresh + (sums[2 * t + 1] + value * held[2 * nth + 1],)
        sums = fresh
    for at in tl.range(HELD * INPUTS, I_, INPUTS, num_stages=STAGES):
        inside, fresh = at + lane < I_, ()
        w0 = tl.load(even + at, mask=inside, other=0)
        w1 = tl.load(odd + at, mask=inside, other=0)
        for t in tl.static_range(4):
            live = inside & (token + t < N)
            value = tl.load(x_at + t * I_ + at, mask=live, other=0).to(tl.float32)
            fresh = fresh + (sums[2 * t] + value * w0, sums[2 * t + 1] + value * w1)
        sums = fresh
    first = tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3]))  # [.., output, token]
    second = tl.join(tl.join(sums[4], sums[5]), tl.join(sums[6], sums[7]))
    total = tl.reshape(tl.sum(tl.join(first, second), 0), (8,))
    place = tl.arange(0, 8)  # output, its lowest bit's token, the upper bit
    own, place = token + (place >> 1 & 1) + (place & 1) * 2, output + (place >> 2)
    tl.store(out + own * O_ + place, total, mask=(own < N) & (place < O_))


@triton.jit
def _wide_linear(
    x, weight, out, N, I_, O_,
    INPUTS: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    output, token = tl.program_id(0) * 2, tl.program_id(1) * 4
    project_few(x, weight, out, output, token, N, I_, O_, INPUTS, HELD, STAGES, CHAINED)


def streams(x: Tensor, weight: Tensor) -> bool:
    """Whether float32 weight [O, I] is for `project_few`, and not for matrix units."""
    outputs, inputs = weight.shape
    tokens = x.numel() // inputs
    return tokens * outputs <= FEW and tokens < MOST_TOKENS


@implement("wide_linear", "cuda")
def wide_linear(x: Tensor, weight: Tensor, fixed: bool = False) -> Tensor:
    outputs, inputs = weight.shape
    tokens = x.numel() // inputs
    exact = weight.dtype == torch.float32 and x.dtype == torch.bfloat16 and tokens > 0
    if exact and (fixed or not streams(x, weight)):
        return wide_products(x, weight, fixed=fixed)
    many = tokens >= MOST_TOKENS and not fixed
    if weight.dtype != torch.float32 or not tokens or many:
        return SPECIFICATIONS["wide_linear"](x, weight)
    out = weight.new_empty((*x.shape[:-1], outputs))
    _wide_linear[(triton.cdiv(outputs, OUTPUTS), triton.cdiv(tokens, TOKENS))](
        x.contiguous(), weight, out, tokens, inputs, outputs,
        INPUTS=INPUTS, HELD=min(MOST_HELD, inputs // INPUTS),
        STAGES=STAGES, CHAINED=CHAINED, num_warps=8, launch_pdl=CHAINED,
    )  # fmt: skip
    return out
