# SPDX-License-Identifier: Apache-2.0
"""FP8 projections of a few tokens whose weights wait in registers for their tokens.

In a round of few tokens most kernels leave the memory idle: they wait for one another. A projection
that is launched early reads all of its weights meanwhile, before it waits for the kernel in front
(`chain`); what is left then is a product out of registers. That takes a weight which fits into the
registers of all programs that run at once, half of the device's. Larger ones are streamed.

A program holds `outputs` rows of `blocks * rounds` blocks of inputs. Its warps share the blocks,
whose sums are added up at the end; what several programs found of an output is added by whoever
reads it (`parts`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from freewheel.ops.cuda.chain import release, wait
from freewheel.ops.cuda.streaming import operand, raw_fp8, true_fp8

MOST_TOKENS = 8
"""A tile of the small matrix instructions. Two need registers that weights are then short of."""

MOST_BYTES = 20 << 20
"""Of a weight: what registers hold beside everything else they are needed for."""

OUTPUTS = 32
"""Of one program."""

SHORT = 16
"""Blocks of inputs up to which one program takes them all."""


class HeldTile(NamedTuple):
    """Of a program: outputs, blocks of inputs at once and how often, warps; programs an output."""

    outputs: int
    blocks: int
    rounds: int
    warps: int
    parts: int

    @property
    def registers(self) -> int:
        """Of a thread, at most: as many as leave room for all programs of a projection at once.

        The compiler would take a few more, which costs one program of four, or of three.
        """
        return 128 if self.rounds < 3 else 168


def held_tile(tokens: int, outputs: int, inputs: int, block: int) -> HeldTile | None:
    """By the weight's shape alone, but for whether it is held at all.

    None: for more tokens, and for weights that are streamed.
    """
    if tokens > MOST_TOKENS or block != 128 or outputs * inputs > MOST_BYTES:
        return None
    blocks = triton.cdiv(inputs, block)
    if blocks <= 4:
        own = triton.next_power_of_2(blocks)
        return HeldTile(OUTPUTS, own, 1, own, 1)
    if blocks <= 12:
        return HeldTile(OUTPUTS, 4, triton.cdiv(blocks, 4), 4, 1)
    if blocks <= SHORT:
        return HeldTile(OUTPUTS, 8, 2, 8, 1)
    return HeldTile(OUTPUTS, 8, 1, 4, triton.cdiv(blocks, 8))


@triton.jit
def hold(
    codes_at, scale_at, place, begin, end,
    BLOCKS: tl.constexpr, ROUNDS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """(codes, scales) of all rounds, on their way into registers.

    codes_at [BLOCKS, OUTPUTS, STEP], scale_at [BLOCKS, OUTPUTS]: pointers of the first round;
    place [BLOCKS, STEP]: its inputs. EVEN: all of them lie below `end`.
    """
    codes, factors = (), ()
    for nth in tl.static_range(ROUNDS):
        at = nth * BLOCKS * STEP
        if EVEN:
            codes = codes + (tl.load(codes_at + at),)
            factors = factors + (tl.load(scale_at + nth * BLOCKS),)
        else:
            inside = (at + place < end)[:, None, :]
            within = (begin + at + tl.arange(0, BLOCKS) * STEP < end)[:, None]
            codes = codes + (tl.load(codes_at + at, mask=inside, other=0),)
            factors = factors + (tl.load(scale_at + nth * BLOCKS, mask=within, other=0),)
    return codes, factors


@triton.jit
def held_products(
    x, weight, scale, out, M, N, K, BLOCK_N, SHARE,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, ROUNDS: tl.constexpr,
    STEP: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, part): the products over SHARE inputs, into `out`."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m, k, block = tl.arange(0, TOKENS), tl.arange(0, STEP), tl.arange(0, BLOCKS)
    row = tl.minimum(n, N - 1)
    begin = tl.program_id(1) * SHARE
    end = tl.minimum(begin + SHARE, K)
    place = begin + block[:, None] * STEP + k[None, :]
    codes_at = weight + (row[None, :, None] * K + place[:, None, :])
    first = scale + row // BLOCK_N * tl.cdiv(K, STEP) + begin // STEP
    codes, factors = hold(
        codes_at, first[None, :] + block[:, None], place, begin, end, BLOCKS, ROUNDS, STEP, EVEN
    )
    release(CHAINED)
    wait(CHAINED)
    x_at = x + (m[None, None, :] * K + place[:, :, None])
    live, values = (m < M)[None, None, :], ()
    for nth in tl.static_range(ROUNDS):
        at = nth * BLOCKS * STEP
        inside = live if EVEN else live & (at + place < end)[:, :, None]
        values = values + (tl.load(x_at + at, mask=inside, other=0),)
    total = tl.zeros((BLOCKS, OUTPUTS, TOKENS), tl.float32)
    for nth in tl.static_range(ROUNDS):
        value = operand(values[nth], ASM)
        both = tl.dot(raw_fp8(codes[nth], ASM), value, input_precision="ieee")
        total += both * factors[nth][:, :, None]
    result = true_fp8(tl.sum(total, 0), ASM)
    target = out + (tl.program_id(1) * M + m)[None, :] * N + n[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])
