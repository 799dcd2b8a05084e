# SPDX-License-Identifier: Apache-2.0
"""float32 projections: of a few tokens in plain float32, of more by exact products (below).

A few tokens are too few for matrix units; what counts is that many programs read the weights at
once, so each computes a few outputs. Sums run over `INPUTS` at a time, in a fixed order. More
tokens in bfloat16 are left to `wide_products`, those in float32 to the library.

Error: a few times 2^-24 of the sum of the products' magnitudes, whatever the number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, fetch, release, wait
from freewheel.ops.cuda.wide_products import wide_products
from freewheel.ops.registry import SPECIFICATIONS, implement

TOKENS, OUTPUTS, INPUTS, STAGES = 4, 2, 1024, 3
"""Of one program; inputs at a time; loads ahead."""

FEW = 2048
"""Results (tokens times outputs) up to which matrix units do not pay."""

MOST_TOKENS = 64
"""From here on the library's product reads the weights less often."""


@triton.jit
def _wide_linear(
    x, weight, out, N, I_, O_,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, INPUTS)
    if CHAINED & (AHEAD > 0):
        first = tl.minimum(tl.program_id(0) * OUTPUTS, O_ - OUTPUTS)
        fetch(weight + first * I_, AHEAD, 128)
    wait(CHAINED)
    total = tl.zeros((TOKENS, OUTPUTS, INPUTS), tl.float32)
    for at in tl.range(0, I_, INPUTS, num_stages=STAGES):
        inside = at + lane < I_
        own = weight + output[:, None] * I_ + at + lane[None, :]
        w = tl.load(own, mask=(output < O_)[:, None] & inside[None, :], other=0)
        source = x + token[:, None] * I_ + at + lane[None, :]
        value = tl.load(source, mask=(token < N)[:, None] & inside[None, :], other=0)
        total += value.to(tl.float32)[:, None, :] * w[None, :, :]
    release(CHAINED)
    target = out + token[:, None] * O_ + output[None, :]
    mask = (token < N)[:, None] & (output < O_)[None, :]
    tl.store(target, tl.sum(total, 2), mask=mask)


@implement("wide_linear", "cuda")
def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    tokens = x.numel() // inputs
    exact = weight.dtype == torch.float32 and x.dtype == torch.bfloat16
    if exact and (tokens * outputs > FEW or tokens >= MOST_TOKENS):
        return wide_products(x, weight)
    if weight.dtype != torch.float32 or not 0 < tokens < MOST_TOKENS:
        return SPECIFICATIONS["wide_linear"](x, weight)
    out, ahead = weight.new_empty((*x.shape[:-1], outputs)), OUTPUTS * inputs
    _wide_linear[(triton.cdiv(outputs, OUTPUTS), triton.cdiv(tokens, TOKENS))](
        x.contiguous(), weight, out, tokens, inputs, outputs,
        TOKENS=TOKENS, OUTPUTS=OUTPUTS, INPUTS=INPUTS, STAGES=STAGES,
        AHEAD=0 if ahead % 512 or outputs < OUTPUTS else ahead, CHAINED=CHAINED,
        num_warps=4, launch_pdl=CHAINED,
    )  # fmt: skip
    return out
