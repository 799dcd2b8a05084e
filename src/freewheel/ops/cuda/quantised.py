# SPDX-License-Identifier: Apache-2.0
"""Projections over FP8 blocks: one launch, or two where programs share the inputs of an output.

Up to some hundred tokens the time is that of the weights' bytes, if enough programs read them at
once. For few tokens a program computes a few outputs, and its warps share the inputs, which a
weight that is not too large awaits in registers (`held_products`); for more, a program computes a
larger tile (`block_products`). Of a weight of few outputs there are not enough
such programs: then several share the inputs, and a second launch adds up what they found, in their
order (`parts`). Still more tokens are left to the library (`wide_prompts`).

Error: that of a sum of float32 products rounded once, so 2^-9 of the result in bfloat16 and a few
times 2^-24 of the sum of the products' magnitudes; above WIDE tokens 2^-9 of that sum, see there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.block_products import block_products
from freewheel.ops.cuda.chain import CHAINED, release, wait
from freewheel.ops.cuda.held_products import MOST_TOKENS as MOST_HELD_TOKENS
from freewheel.ops.cuda.held_products import HeldTile, held_products, held_tile
from freewheel.ops.cuda.parts import add_parts, room_for_parts
from freewheel.ops.cuda.streaming import few_tokens, many_tokens
from freewheel.ops.cuda.wide_prompts import multiply_widened
from freewheel.ops.registry import SPECIFICATIONS, implement

FEW, FEW_SHORT, SHORT = 16, 32, 2560
"""Tokens up to which small matrix instructions do, of weights of at most SHORT inputs FEW_SHORT."""

WIDE = 192
"""Tokens beyond which arithmetic costs most."""

ENOUGH, MOST = 100, 264
"""Tiles of a weight that need no parts, and programs that others are cut into: two a processor."""

STEPS = (32, 64, 128)
"""Inputs that one scale may cover; other blocks are left to the specification."""


class FewTile(NamedTuple):
    """Outputs of a program, warps that share its inputs, loads ahead; programs that share them."""

    outputs: int
    slices: int
    stages: int
    parts: int


class ManyTile(NamedTuple):
    """Tokens and outputs of a program, its warps, loads ahead, and programs that share inputs."""

    tokens: int
    outputs: int
    warps: int
    stages: int
    parts: int


# Tiles are chosen by the weight's shape, but for a program's tokens and its loads ahead. So the
# order of a sum changes with the tokens only where the kernel does.


def few_tile(tokens: int, outputs: int, inputs: int) -> FewTile:
    """Of few tokens."""
    if inputs <= SHORT:
        return FewTile(32, 2, 4 if tokens <= FEW else 3, 1)
    if outputs >= 6144:
        return FewTile(32, 4, 4, 1)
    return FewTile(32, 2, 4, max(1, min(2 * MOST // triton.cdiv(outputs, 32), inputs // 1024)))


def product_tile(tokens: int, outputs: int) -> ManyTile:
    """Of up to WIDE tokens, by the large matrix instructions."""
    tiles = triton.cdiv(outputs, 64)
    parts = 1 if tiles >= ENOUGH else max(1, MOST // tiles)
    return ManyTile(32 if tokens <= 32 else 64, 64, 4, 3, parts)


def many_tile(tokens: int, fast: bool) -> ManyTile:
    """Of weights whose blocks the other kernels do not take, and of float32."""
    parts = 2 if tokens <= WIDE else 1
    return ManyTile(64, 128, 8, 3, parts) if fast else ManyTile(32, 32, 4, 2, parts)


@triton.jit
def _few(
    x, weight, scale, out, M, N, K, BLOCK_N, SHARE,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.arange(0, TOKENS)
    row = tl.minimum(n, N - 1)
    scale_row = scale + row // BLOCK_N * tl.cdiv(K, STEP)
    begin = tl.program_id(1) * SHARE
    total = few_tokens(
        weight + row.to(tl.int64) * K, x + m.to(tl.int64) * K, m < M, scale_row,
        begin, tl.minimum(begin + SHARE, K),
        OUTPUTS, TOKENS, SLICES, STEP, STAGES, EVEN, ASM,
    )  # fmt: skip
    release(CHAINED)
    target = out + (tl.program_id(1) * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def _many(
    x, weight, scale, out, M, N, K, BLOCK_N, SHARE,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    ONE_SCALE: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(n, N - 1)
    first = tl.program_id(1) * OUTPUTS if ONE_SCALE else row
    scale_row = scale + first // BLOCK_N * tl.cdiv(K, STEP)
    begin = tl.program_id(2) * SHARE
    total = many_tokens(
        weight + row.to(tl.int64) * K, x + m.to(tl.int64) * K, m < M, scale_row,
        begin, tl.minimum(begin + SHARE, K),
        OUTPUTS, TOKENS, STEP, STAGES, ONE_SCALE, EVEN, ASM,
    )  # fmt: skip
    release(CHAINED)
    target = out + (tl.program_id(2) * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def uses_matrix_units(x: Tensor) -> bool:
    """bfloat16 on a device; elsewhere (float32, the interpreter) weights widen to float32."""
    return x.is_cuda and x.dtype == torch.bfloat16


@implement("block_linear", "cuda")
def block_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, block_n: int = 128, block_k: int = 128
) -> Tensor:
    outputs, inputs = weight.shape
    tokens = x.numel() // inputs
    if x.dtype not in (torch.bfloat16, torch.float32) or block_k not in STEPS or not tokens:
        return SPECIFICATIONS["block_linear"](x, weight, weight_scale, block_n, block_k)
    given = Given(x.contiguous(), weight, weight_scale, tokens, outputs, inputs, block_n, block_k)
    out = x.new_empty((*x.shape[:-1], outputs))
    fast = uses_matrix_units(x)
    held = held_tile(tokens, outputs, inputs, block_k) if fast else None
    if held is not None:
        return launch_held(given, out, held)
    if tokens <= (FEW_SHORT if inputs <= SHORT else FEW):
        return launch_few(given, out, few_tile(tokens, outputs, inputs))
    if fast and tokens > WIDE:
        return multiply_widened(given.x, weight, weight_scale, out, block_n, block_k)
    if fast and block_n % 64 == 0 and inputs % block_k == 0:
        return launch_products(given, out, product_tile(tokens, outputs))
    return launch_many(given, out, many_tile(tokens, fast))


class Given(NamedTuple):
    """The arguments of a projection, and its sizes."""

    x: Tensor  # float [..., K], contiguous
    weight: Tensor  # float8_e4m3fn [N, K]
    scale: Tensor  # float32 [ceil(N / block_n), ceil(K / block_k)]
    tokens: int
    outputs: int
    inputs: int
    block_n: int
    block_k: int

    def args(self, out: Tensor, share: int) -> tuple[Tensor | int, ...]:
        """What both kernels take; a program adds up `share` inputs."""
        sizes = (self.tokens, self.outputs, self.inputs, self.block_n, share)
        return self.x, self.weight.view(torch.uint8), self.scale, out, *sizes


def share_of(inputs: int, step: int, parts: int) -> tuple[int, int]:
    """(inputs of one of at most `parts` programs, whole steps; how many programs that takes)."""
    share = triton.cdiv(triton.cdiv(inputs, step), parts) * step
    return share, triton.cdiv(inputs, share)


def launch_held(given: Given, out: Tensor, tile: HeldTile) -> Tensor:
    """`out` [tokens, N] with at most 8 tokens."""
    room = room_for_parts(out, tile.parts)
    fill_parts(given, room, tile)
    return add_parts(room, out)


def fill_parts(given: Given, room: Tensor, tile: HeldTile) -> None:
    """`room`, as `room_for_parts` makes it, set to what programs find; it is yet to be added up."""
    share = tile.blocks * tile.rounds * given.block_k
    held_products[(triton.cdiv(given.outputs, tile.outputs), tile.parts)](
        *given.args(room, share), OUTPUTS=tile.outputs, TOKENS=MOST_HELD_TOKENS,
        BLOCKS=tile.blocks, ROUNDS=tile.rounds, STEP=given.block_k,
        EVEN=given.inputs == share * tile.parts, ASM=uses_matrix_units(given.x), CHAINED=CHAINED,
        num_warps=tile.warps, maxnreg=tile.registers, launch_pdl=CHAINED,
    )  # fmt: skip


def launch_few(given: Given, out: Tensor, tile: FewTile) -> Tensor:
    """`out` [tokens, N] with at most 32 tokens."""
    span = given.block_k * tile.slices
    share, programs = share_of(given.inputs, span, tile.parts)
    room = room_for_parts(out, programs)
    _few[(triton.cdiv(given.outputs, tile.outputs), programs)](
        *given.args(room, share), OUTPUTS=tile.outputs,
        TOKENS=max(8, triton.next_power_of_2(given.tokens)), SLICES=tile.slices,
        STEP=given.block_k, STAGES=tile.stages, EVEN=given.inputs % span == 0,
        ASM=uses_matrix_units(given.x), CHAINED=CHAINED, num_warps=tile.slices, launch_pdl=CHAINED,
    )  # fmt: skip
    return add_parts(room, out)


def launch_products(given: Given, out: Tensor, tile: ManyTile) -> Tensor:
    """`out` [tokens, N]; whole blocks of inputs, and tiles of outputs that no block's edge cuts."""
    share, programs = share_of(given.inputs, given.block_k, tile.parts)
    room = room_for_parts(out, programs)
    grid = (
        triton.cdiv(given.tokens, tile.tokens), triton.cdiv(given.outputs, tile.outputs), programs,
    )  # fmt: skip
    block_products[grid](
        given.x, given.weight.view(torch.uint16), given.scale, room, given.tokens, given.outputs,
        given.inputs, given.block_n, share, OUTPUTS=tile.outputs, TOKENS=tile.tokens,
        STEP=given.block_k, STAGES=tile.stages, ASM=uses_matrix_units(given.x),
        CHAINED=CHAINED, num_warps=tile.warps, launch_pdl=CHAINED,
    )  # fmt: skip
    return add_parts(room, out)


def launch_many(given: Given, out: Tensor, tile: ManyTile) -> Tensor:
    """`out` [tokens, N] with any number of tokens."""
    share, programs = share_of(given.inputs, given.block_k, tile.parts)
    room = room_for_parts(out, programs)
    grid = (
        triton.cdiv(given.tokens, tile.tokens), triton.cdiv(given.outputs, tile.outputs), programs,
    )  # fmt: skip
    _many[grid](
        *given.args(room, share), OUTPUTS=tile.outputs, TOKENS=tile.tokens, STEP=given.block_k,
        STAGES=tile.stages, ONE_SCALE=given.block_n % tile.outputs == 0,
        EVEN=given.inputs % given.block_k == 0, ASM=uses_matrix_units(given.x),
        CHAINED=CHAINED, num_warps=tile.warps, launch_pdl=CHAINED,
    )  # fmt: skip
    return add_parts(room, out)
