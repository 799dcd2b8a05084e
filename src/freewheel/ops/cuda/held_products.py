# SPDX-License-Identifier: Apache-2.0
"""FP8 projections of a few tokens whose weights wait in registers for their tokens.

In a round of few tokens most kernels leave the memory idle: they wait for one another. A projection
that is launched early reads all of its weights meanwhile, before it waits for the kernel in front
(`chain`); what is left then is a product out of registers. That takes a weight which fits into the
registers of all programs that run at once, half of the device's. Larger ones are streamed.

A program holds `outputs` rows of `blocks * rounds` blocks of inputs. Its warps share the blocks,
whose sums are added up at the end, in their order; what several programs found of an output is
added by whoever reads it (`parts`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from freewheel.ops.cuda.chain import release, wait
from freewheel.ops.cuda.streaming import widen_fp8

MOST_TOKENS = 8
"""A tile of the small matrix instructions. Two need registers that weights are then short of."""

MOST_BYTES = 20 << 20
"""Of a weight: what registers hold beside everything else they are needed for."""

OUTPUTS = 32
"""Of one program."""

SHORT = 16
"""Blocks of inputs up to which one program takes them all."""


class HeldTile(NamedTuple):
    """Of a program: outputs, blocks of inputs at once and how often, warps; programs an output.

    `apart`: blocks that are added up by themselves, before such sums are.
    """

    outputs: int
    blocks: int
    rounds: int
    warps: int
    parts: int
    apart: int

    @property
    def registers(self) -> int:
        """Of a thread, at most: as many as leave room for all programs of a projection at once.

        The compiler would take a few more, which costs one program of four, or of three.
        """
        return 128 if self.rounds < 3 else 168


def held_tile(tokens: int, outputs: int, inputs: int, parts: int) -> HeldTile | None:
    """Of programs that share the inputs as `parts` of `early_products` do, or take several parts.

    None: for more tokens, and for weights that are streamed.
    """
    blocks = triton.cdiv(inputs, 128)
    apart = triton.cdiv(blocks, parts)
    own, parts = (blocks, 1) if blocks <= SHORT else (apart, triton.cdiv(blocks, apart))
    if tokens > MOST_TOKENS or outputs * inputs > MOST_BYTES or own > SHORT:
        return None
    if own <= 4:
        count = triton.next_power_of_2(own)
        return HeldTile(OUTPUTS, count, 1, count, parts, apart)
    if own <= 8 < blocks:
        return HeldTile(OUTPUTS, 8, 1, 4, parts, apart)
    if own <= 12:
        return HeldTile(OUTPUTS, 4, triton.cdiv(own, 4), 4, parts, apart)
    return HeldTile(OUTPUTS, 8, 2, 8, parts, apart)


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
def _apart(x, COUNT: tl.constexpr):
    """[A, B, COUNT], a power of two up to 8 -> a tuple of COUNT [A, B, 1], in their order."""
    found = (x,)
    for bit in tl.static_range(3):
        if 1 << bit < COUNT:
            evens, odds = (), ()
            for nth in tl.static_range(1 << bit):
                pairs = found[nth].reshape(x.shape[0], x.shape[1], COUNT >> bit + 1, 2)
                even, odd = tl.split(pairs)
                evens, odds = evens + (even,), odds + (odd,)
            found = evens + odds
    return found


@triton.jit
def held_products(
    x, weight, scale, out, M, N, K, BLOCK_N, SHARE,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, ROUNDS: tl.constexpr,
    APART: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, part): the products over SHARE inputs, into `out`.

    Blocks are added up one after another, as `early_products` does. Its instructions and these give
    the same bits for a block: both add 16 products at once to what they have, in the same way,
    whatever the height of the tile.
    """
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
    whole = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for nth in tl.static_range(ROUNDS):
        value = values[nth] if ASM else values[nth].to(tl.float32)
        both = tl.dot(widen_fp8(codes[nth], ASM), value, input_precision="ieee")
        sums = _apart(both.permute((1, 2, 0)), BLOCKS)
        own = _apart(factors[nth].permute((1, 0)).expand_dims(1), BLOCKS)
        for part in tl.static_range(BLOCKS):
            if (nth * BLOCKS + part) % APART == 0:
                whole += total
                total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
            total += sums[part].reshape(OUTPUTS, TOKENS) * own[part].reshape(OUTPUTS, 1)
    total += whole
    target = out + (tl.program_id(1) * M + m)[None, :] * N + n[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])
