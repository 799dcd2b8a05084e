# SPDX-License-Identifier: Apache-2.0
"""float32 projections of a few tokens: a program computes a few outputs, in plain float32.

There are too few tokens for matrix units, which would round anyway; what counts is that many
programs read the weights at once. Sums run over `INPUTS` at a time, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, fetch, release, wait
from freewheel.ops.registry import SPECIFICATIONS, implement

TOKENS, OUTPUTS, INPUTS, STAGES = 4, 2, 1024, 3
"""Of one program; inputs at a time; loads ahead."""

MOST_TOKENS = 64
"""From here on a matrix product reads the weights less often."""


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
