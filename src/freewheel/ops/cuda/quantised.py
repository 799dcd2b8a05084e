# SPDX-License-Identifier: Apache-2.0
"""Projections over FP8 blocks: one launch, or two where programs share the inputs of an output.

Up to some hundred tokens the time is that of the weights' bytes, if enough programs read them at
once. For few tokens a program computes a few outputs, and its warps share the inputs, which a
weight that is not too large awaits in registers (`held_products`); for more, a program computes a
larger tile (`ring_products`, `early_products`, and `block_products` where neither serves). Of a
weight of few outputs there are not enough such programs: then several share the inputs, and a
second launch adds up what they found, in their order (`parts`). Still more tokens are left to the
library (`wide_prompts`).

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
from freewheel.ops.cuda.early_products import BLOCK, EarlyTile, early_products, early_tile
from freewheel.ops.cuda.early_products import serves as early_serves
from freewheel.ops.cuda.held_products import MOST_TOKENS as MOST_HELD_TOKENS
from freewheel.ops.cuda.held_products import (
    HeldTile,
    held_products,
    held_tile,
)
from freewheel.ops.cuda.parts import add_parts, room_for_parts
from freewheel.ops.cuda.ring_products import RingTile, ring_products, ring_tile
from freewheel.ops.cuda.ring_products import serves as ring_serves
from freewheel.ops.cuda.streaming import few_tokens, many_tokens
from freewheel.ops.cuda.wide_prompts import multiply_widened
from freewheel.ops.registry import SPECIFICATIONS, implement

FEW, FEW_SHORT, SHORT = 16, 32, 2560
"""Tokens up to which small matrix instructions do, of weights of at most SHORT inputs FEW_SHORT."""

FIXED_PIECE = 1024
"""Tokens of one launch at most, where sums keep one order."""

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


class ProductTile(NamedTuple):
    """As `ManyTile`, of `block_products`."""

    tokens: int
    outputs: int
    warps: int
    stages: int
    parts: int


Tile = HeldTile | FewTile | RingTile | EarlyTile | ProductTile | ManyTile
"""One class for each kernel."""


# Tiles are chosen by the weight's shape, but for a program's tokens and its loads ahead. So the
# order of a sum changes with the tokens only where the kernel does.


def few_tile(tokens: int, outputs: int, inputs: int) -> FewTile:
    """Of few tokens."""
    if inputs <= SHORT:
        return FewTile(32, 2, 4 if tokens <= FEW else 3, 1)
    if outputs >= 6144:
        return FewTile(32, 4, 4, 1)
    return FewTile(32, 2, 4, max(1, min(2 * MOST // triton.cdiv(outputs, 32), inputs // 1024)))


def product_tile(tokens: int, outputs: int) -> ProductTile:
    """Of up to WIDE tokens, by the large matrix instructions."""
    tiles = triton.cdiv(outputs, 64)
    parts = 1 if tiles >= ENOUGH else max(1, MOST // tiles)
    return ProductTile(32 if tokens <= 32 else 64, 64, 4, 3, parts)


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
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    block_n: int = 128,
    block_k: int = 128,
    fixed: bool = False,
) -> Tensor:
    outputs, inputs = weight.shape
    tokens = x.numel() // inputs
    if x.dtype not in (torch.bfloat16, torch.float32) or block_k not in STEPS or not tokens:
        return SPECIFICATIONS["block_linear"](x, weight, weight_scale, block_n, block_k)
    given = Given(x.contiguous(), weight, weight_scale, tokens, outputs, inputs, block_n, block_k)
    out = x.new_empty((*x.shape[:-1], outputs))
    if fixed:
        return _launch_fixed(given, out)
    tile = tile_of(given)
    if tile is None:
        return multiply_widened(given.x, weight, weight_scale, out, block_n, block_k)
    return launch(given, out, tile)


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


def tile_of(given: Given, fixed: bool = False) -> Tile | None:
    """The kernel for a projection, and its tile. None: the library's product.

    `fixed`: of those that sum in one order, which are the tiles of many tokens.
    """
    tokens, outputs, inputs = given.tokens, given.outputs, given.inputs
    fast = uses_matrix_units(given.x)
    early = early_serves(given.x, inputs, given.block_n, given.block_k)
    if fixed:
        tokens = min(max(tokens, 1 if early else FEW_SHORT + 1), WIDE)
    if early if fixed else fast and given.block_k == BLOCK:
        # By the parts that more tokens have.
        held = held_tile(tokens, outputs, inputs, early_tile(tokens, outputs, inputs).parts)
        if held is not None:
            return held
    few = FEW_SHORT if inputs <= SHORT and not early else FEW
    if tokens <= few and not (fixed and early):
        return few_tile(tokens, outputs, inputs)
    if fast and tokens > WIDE:
        return None
    if early:
        rings = not fixed and ring_serves(given.x, given.weight, given.block_n, given.block_k)
        return (ring_tile if rings else early_tile)(tokens, outputs, inputs)
    if fast and given.block_n % 64 == 0 and inputs % given.block_k == 0:
        return product_tile(tokens, outputs)
    return many_tile(tokens, fast)


def _launch_fixed(given: Given, out: Tensor) -> Tensor:
    """`out`, in pieces of FIXED_PIECE tokens."""
    tile, lines = tile_of(given, True), out.view(-1, given.outputs)
    assert tile is not None and not isinstance(tile, FewTile)
    parts = given.x.view(-1, given.inputs).split(FIXED_PIECE)
    for x, piece in zip(parts, lines.split(FIXED_PIECE), strict=True):
        launch(given._replace(x=x, tokens=len(x)), piece, tile)
    return out


def launch(given: Given, out: Tensor, tile: Tile) -> Tensor:
    """`out` [..., N], set to the projection."""
    room = room_for_parts(out, shares(given, tile)[1])
    fill_parts(given, room, tile)
    return add_parts(room, out)


def shares(given: Given, tile: Tile) -> tuple[int, int]:
    """(inputs of one of the programs that share an output's; how many such programs there are)."""
    match tile:
        case HeldTile() if tile.parts == 1:
            return given.inputs, 1
        case FewTile():
            return share_of(given.inputs, given.block_k * tile.slices, tile.parts)
        case _:
            return share_of(given.inputs, given.block_k, tile.parts)


def fill_parts(given: Given, room: Tensor, tile: Tile) -> None:
    """`room`, as `room_for_parts` makes it, set to what programs find; it is yet to be added up."""
    share, parts = shares(given, tile)
    match tile:
        case HeldTile():
            _fill_held(given, room, tile, share, parts)
        case FewTile():
            _fill_few(given, room, tile, share, parts)
        case RingTile():
            lines = given.x.view(given.tokens, given.inputs)
            ring_products(lines, given.weight, given.scale, room, given.block_n, share, tile)
        case EarlyTile():
            _fill_early(given, room, tile, share, parts)
        case ProductTile():
            _fill_products(given, room, tile, share, parts)
        case ManyTile():
            _fill_many(given, room, tile, share, parts)


def _fill_held(given: Given, room: Tensor, tile: HeldTile, share: int, parts: int) -> None:
    """Of at most 8 tokens."""
    even = share == tile.blocks * tile.rounds * given.block_k and given.inputs == share * parts
    held_products[(triton.cdiv(given.outputs, tile.outputs), parts)](
        *given.args(room, share), OUTPUTS=tile.outputs, TOKENS=MOST_HELD_TOKENS,
        BLOCKS=tile.blocks, ROUNDS=tile.rounds, APART=tile.apart, STEP=given.block_k, EVEN=even,
        ASM=uses_matrix_units(given.x), CHAINED=CHAINED, num_warps=tile.warps,
        maxnreg=tile.registers, launch_pdl=CHAINED,
    )  # fmt: skip


def _fill_few(given: Given, room: Tensor, tile: FewTile, share: int, parts: int) -> None:
    """Of at most 32 tokens."""
    _few[(triton.cdiv(given.outputs, tile.outputs), parts)](
        *given.args(room, share), OUTPUTS=tile.outputs,
        TOKENS=max(8, triton.next_power_of_2(given.tokens)), SLICES=tile.slices,
        STEP=given.block_k, STAGES=tile.stages,
        EVEN=given.inputs % (given.block_k * tile.slices) == 0,
        ASM=uses_matrix_units(given.x), CHAINED=CHAINED, num_warps=tile.slices, launch_pdl=CHAINED,
    )  # fmt: skip


def _fill_early(given: Given, room: Tensor, tile: EarlyTile, share: int, parts: int) -> None:
    """Of whole blocks of inputs and outputs."""
    grid = (
        triton.cdiv(given.outputs, given.block_k), parts, triton.cdiv(given.tokens, tile.tokens),
    )  # fmt: skip
    early_products[grid](
        given.x, given.weight.view(torch.uint16), given.scale, room, given.tokens, given.outputs,
        given.inputs // 2, given.block_n, share // given.block_k, TOKENS=tile.tokens,
        STAGES=tile.stages, CODES=tile.codes, CHAINED=CHAINED, num_warps=8, launch_pdl=CHAINED,
    )  # fmt: skip


def _fill_products(given: Given, room: Tensor, tile: ProductTile, share: int, parts: int) -> None:
    """Of whole blocks of inputs, and tiles of outputs that no block's edge cuts."""
    grid = (triton.cdiv(given.tokens, tile.tokens), triton.cdiv(given.outputs, tile.outputs), parts)
    block_products[grid](
        given.x, given.weight.view(torch.uint16), given.scale, room, given.tokens, given.outputs,
        given.inputs, given.block_n, share, OUTPUTS=tile.outputs, TOKENS=tile.tokens,
        STEP=given.block_k, STAGES=tile.stages, ASM=uses_matrix_units(given.x),
        CHAINED=CHAINED, num_warps=tile.warps, launch_pdl=CHAINED,
    )  # fmt: skip


def _fill_many(given: Given, room: Tensor, tile: ManyTile, share: int, parts: int) -> None:
    """Of any number of tokens."""
    grid = (triton.cdiv(given.tokens, tile.tokens), triton.cdiv(given.outputs, tile.outputs), parts)
    _many[grid](
        *given.args(room, share), OUTPUTS=tile.outputs, TOKENS=tile.tokens, STEP=given.block_k,
        STAGES=tile.stages, ONE_SCALE=given.block_n % tile.outputs == 0,
        EVEN=given.inputs % given.block_k == 0, ASM=uses_matrix_units(given.x),
        CHAINED=CHAINED, num_warps=tile.warps, launch_pdl=CHAINED,
    )  # fmt: skip
