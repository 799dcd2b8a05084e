# SPDX-License-Identifier: Apache-2.0
"""Projections of one input in one launch, though one is stored in FP8 and another in float32.

A program takes some outputs of one of the three weights, and the inputs of one part. So the weights
of a layer's whole first step cross memory side by side, and nothing waits between them. Up to
FEW_TOKENS the small matrix instructions do, as in `streaming`; more are tiles of the large ones, as
in `block_products`; still more are left to the kernels of each storage.

Error: that of a sum of products in float32, which for float32 weights are exact (`wide_products`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.block_products import widen_pairs
from freewheel.ops.cuda.chain import CHAINED, release, wait
from freewheel.ops.cuda.entries import project_raw
from freewheel.ops.cuda.linear import wide_linear
from freewheel.ops.cuda.quantised import block_linear, uses_matrix_units
from freewheel.ops.cuda.streaming import few_tokens
from freewheel.ops.cuda.wide_products import thirds
from freewheel.ops.registry import SPECIFICATIONS, implement
from freewheel.ops.sharing import FEW_TOKENS, MANY_TOKENS, share_of

STEP = 128
"""Inputs that one scale covers, and that are multiplied at a time; of float32 weights half."""


class Tile(NamedTuple):
    """Outputs of a program, its warps, and its loads ahead: of FP8, and of wider weights."""

    outputs: int
    warps: int
    ahead: int
    wide_ahead: int


MOST_ROWS = 64
"""Tokens of a tile of many, at most."""

FEW_TILE, MANY_TILE = Tile(32, 2, 4, 3), Tile(64, 4, 3, 2)


@triton.jit
def few_plain(
    weight, x, live, begin, end,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """float32 [OUTPUTS, TOKENS] as `few_tokens`, of weights without scales.

    EXACT: float32 weights meet bfloat16 tokens.
    """
    k, part = tl.arange(0, STEP), tl.arange(0, SLICES)
    place = part[:, None] * STEP + k[None, :]
    weight_at = weight[None, :, None] + place[:, None, :]
    x_at = x[None, None, :] + place[:, :, None]
    total = tl.zeros((SLICES, OUTPUTS, TOKENS), tl.float32)
    for at in tl.range(begin, end, STEP * SLICES, num_stages=STAGES):
        if EVEN:
            own = tl.load(weight_at + at)
            value = tl.load(x_at + at, mask=live[None, None, :], other=0)
        else:
            inside = at + place < end
            own = tl.load(weight_at + at, mask=inside[:, None, :], other=0)
            value = tl.load(x_at + at, mask=inside[:, :, None] & live[None, None, :], other=0)
        if EXACT:
            high, middle, low = thirds(own)
            # The units cut off what lies below their sum's last bit: it is kept short.
            total += tl.dot(high, value, tl.dot(middle, value, tl.dot(low, value)))
        else:
            total = tl.dot(own, value, total, input_precision="ieee")
    return tl.sum(total, 0)


@triton.jit
def _few(
    x, weight, scale, plain, gates, out, tokens, K, N, M, G, SHARE,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr,
    AHEAD: tl.constexpr, WIDE_AHEAD: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    tile, m = tl.program_id(0), tl.arange(0, TOKENS)
    begin = tl.program_id(1) * SHARE
    end = tl.minimum(begin + SHARE, K)
    first, second = tl.cdiv(N, OUTPUTS), tl.cdiv(M, OUTPUTS)
    x_row, live = x + m.to(tl.int64) * K, m < tokens
    lane = tl.arange(0, OUTPUTS)
    if tile < first:
        n, count, before = tile * OUTPUTS + lane, N, 0
        row = tl.minimum(n, N - 1)
        if PACKED:
            total = few_tokens(
                weight + row.to(tl.int64) * K, x_row, live, scale + row // STEP * tl.cdiv(K, STEP),
                begin, end, OUTPUTS, TOKENS, SLICES, STEP, AHEAD, EVEN, ASM,
            )  # fmt: skip
        else:
            total = few_plain(
                weight + row.to(tl.int64) * K, x_row, live, begin, end,
                OUTPUTS, TOKENS, SLICES, STEP, WIDE_AHEAD, False, EVEN,
            )  # fmt: skip
    elif tile < first + second:
        n, count, before = (tile - first) * OUTPUTS + lane, M, N
        total = few_plain(
            plain + tl.minimum(n, M - 1).to(tl.int64) * K, x_row, live, begin, end,
            OUTPUTS, TOKENS, SLICES, STEP, WIDE_AHEAD, False, EVEN,
        )  # fmt: skip
    else:
        n, count, before = (tile - first - second) * OUTPUTS + lane, G, N + M
        total = few_plain(
            gates + tl.minimum(n, G - 1).to(tl.int64) * K, x_row, live, begin, end,
            OUTPUTS, TOKENS, SLICES, STEP // 2, WIDE_AHEAD, EXACT, EVEN,
        )  # fmt: skip
    release(CHAINED)
    cell = (tl.program_id(1) * tokens + m).to(tl.int64) * (N + M + G) + before
    tl.store(out + cell[None, :] + n[:, None], total, mask=live[None, :] & (n < count)[:, None])


@triton.jit
def _plain_tile(
    weight, x, live, begin, end,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """float32 [OUTPUTS, TOKENS] of rows at `weight` and at `x`; whole steps."""
    k = tl.arange(0, STEP)
    weight_at, x_at = weight[:, None] + k[None, :], x[None, :] + k[:, None]
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for at in tl.range(begin, end, STEP, num_stages=STAGES):
        own = tl.load(weight_at + at)
        value = tl.load(x_at + at, mask=live[None, :], other=0)
        if EXACT:
            high, middle, low = thirds(own)
            total += tl.dot(high, value, tl.dot(middle, value, tl.dot(low, value)))
        else:
            total = tl.dot(own, value, total, input_precision="ieee")
    return total


@triton.jit
def _packed_tile(
    pairs, x, live, scale, begin, end,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same, of FP8 rows read in pairs, which lie in the same blocks: `scale` is one pointer."""
    k, half = tl.arange(0, STEP), tl.arange(0, STEP // 2)
    pairs_at, x_at = pairs[:, None] + half[None, :], x[None, :] + k[:, None]
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for at in tl.range(begin, end, STEP, num_stages=STAGES):
        own = tl.load(pairs_at + at // 2)
        value = tl.load(x_at + at, mask=live[None, :], other=0)
        factor = tl.load(scale + at // STEP)
        total += tl.dot(widen_pairs(own, True), value) * factor
    return total


@triton.jit
def _many(
    x, weight, scale, plain, gates, out, tokens, K, N, M, G, SHARE,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
    WIDE_AHEAD: tl.constexpr, PACKED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """As `_few`; K and SHARE are whole steps, N whole tiles if packed. `weight`: pairs of codes."""
    wait(CHAINED)
    tile, m = tl.program_id(1), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    begin = tl.program_id(2) * SHARE
    end = tl.minimum(begin + SHARE, K)
    first, second = tl.cdiv(N, OUTPUTS), tl.cdiv(M, OUTPUTS)
    x_row, live = x + m.to(tl.int64) * K, m < tokens
    lane = tl.arange(0, OUTPUTS)
    if tile < first:
        n, count, before = tile * OUTPUTS + lane, N, 0
        row = tl.minimum(n, N - 1).to(tl.int64)
        if PACKED:
            total = _packed_tile(
                weight + row * (K // 2), x_row, live, scale + tile * OUTPUTS // STEP * (K // STEP),
                begin, end, OUTPUTS, TOKENS, STEP, AHEAD,
            )  # fmt: skip
        else:
            total = _plain_tile(
                weight + row * K, x_row, live, begin, end, OUTPUTS, TOKENS, STEP // 2, AHEAD, False
            )
    elif tile < first + second:
        n, count, before = (tile - first) * OUTPUTS + lane, M, N
        total = _plain_tile(
            plain + tl.minimum(n, M - 1).to(tl.int64) * K, x_row, live, begin, end,
            OUTPUTS, TOKENS, STEP // 2, AHEAD, False,
        )  # fmt: skip
    else:
        n, count, before = (tile - first - second) * OUTPUTS + lane, G, N + M
        total = _plain_tile(
            gates + tl.minimum(n, G - 1).to(tl.int64) * K, x_row, live, begin, end,
            OUTPUTS, TOKENS, STEP // 2, WIDE_AHEAD, True,
        )  # fmt: skip
    release(CHAINED)
    cell = (tl.program_id(2) * tokens + m).to(tl.int64) * (N + M + G) + before
    tl.store(out + cell[None, :] + n[:, None], total, mask=live[None, :] & (n < count)[:, None])


class Given(NamedTuple):
    """The arguments of a call, contiguous, and its sizes."""

    x: Tensor  # float [..., K]
    weight: Tensor  # float8_e4m3fn or float [N, K]
    scale: Tensor | None  # float32 [ceil(N / 128), ceil(K / 128)]
    plain: Tensor | None  # float [M, K]
    gates: Tensor | None  # float32 [G, K]
    tokens: int
    share: int

    def args(self, weight: Tensor, out: Tensor) -> tuple[Tensor | int, ...]:
        """What both kernels take. An absent weight has no rows, and no program reads it.

        What stands in its place has its dtype: its code is compiled.
        """
        own = (self.scale, self.plain, self.gates)
        absent = (out, self.x, out)
        some = tuple(a if part is None else part for part, a in zip(own, absent, strict=True))
        counts = tuple(0 if part is None else len(part) for part in own[1:])
        sizes = (self.tokens, self.x.shape[-1], len(self.weight), *counts, self.share)
        return self.x, weight, *some, out, *sizes

    def tiles(self, outputs: int) -> int:
        """Programs that it takes to compute all outputs."""
        own = (self.weight, self.plain, self.gates)
        return sum(triton.cdiv(len(part), outputs) for part in own if part is not None)

    def kernels_serve(self) -> bool:
        """Whether `_few` takes these dtypes, and a whole number of blocks as inputs."""
        dtype = self.x.dtype
        narrow = (None if self.scale is not None else self.weight, self.plain)
        alike = all(part is None or part.dtype == dtype for part in narrow)
        wide = self.gates is None or self.gates.dtype == torch.float32
        known = dtype in (torch.bfloat16, torch.float32)
        return known and alike and wide and self.x.shape[-1] % STEP == 0


@implement("shared_products", "cuda")
def shared_products(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    plain: Tensor | None,
    gates: Tensor | None,
    parts: int,
    fixed: bool = False,
) -> Tensor:
    inputs = x.shape[-1]
    tokens, share = x.numel() // inputs, share_of(inputs, parts)
    given = Given(x.contiguous(), weight, weight_scale, plain, gates, tokens, share)
    fast = uses_matrix_units(x)
    outputs = sum(len(own) for own in (weight, plain, gates) if own is not None)
    if fast and tokens > MANY_TOKENS and parts == 1 and given.kernels_serve():
        return _wide(given, outputs)
    whole = weight_scale is None or len(weight) % MANY_TILE.outputs == 0
    many = fast and whole and tokens <= MANY_TOKENS
    few = tokens <= FEW_TOKENS and not fixed
    if not tokens or not given.kernels_serve() or not (few or many):
        own = (weight, weight_scale, plain, gates, parts)
        return _specified(x, *own) if fixed else SPECIFICATIONS["shared_products"](x, *own)
    out = torch.empty((parts, *x.shape[:-1], outputs), dtype=torch.float32, device=x.device)
    return (_launch_few if few else _launch_many)(given, out)


def _specified(x: Tensor, *own: Tensor | int | None) -> Tensor:
    """The specification, of so many tokens at a time that the library's products have one shape."""
    lines = x.reshape(-1, x.shape[-1])
    missing = -len(lines) % FEW_TOKENS
    blocks = torch.nn.functional.pad(lines, (0, 0, 0, missing)).split(FEW_TOKENS)
    found = torch.cat([SPECIFICATIONS["shared_products"](block, *own) for block in blocks], 1)
    return found[:, : len(lines)].unflatten(1, x.shape[:-1])


def _launch_few(given: Given, out: Tensor) -> Tensor:
    tile, packed = FEW_TILE, given.scale is not None
    fast = uses_matrix_units(given.x)
    weight = given.weight.view(torch.uint8) if packed else given.weight
    _few[(given.tiles(tile.outputs), out.shape[0])](
        *given.args(weight, out), OUTPUTS=tile.outputs,
        TOKENS=max(8, triton.next_power_of_2(given.tokens)), SLICES=tile.warps, STEP=STEP,
        AHEAD=tile.ahead, WIDE_AHEAD=tile.wide_ahead, PACKED=packed, EXACT=fast,
        EVEN=given.share % (STEP * tile.warps) == 0 and given.x.shape[-1] % given.share == 0,
        ASM=fast, CHAINED=CHAINED, num_warps=tile.warps, launch_pdl=CHAINED,
    )  # fmt: skip
    return out


def _launch_many(given: Given, out: Tensor) -> Tensor:
    tile, packed = MANY_TILE, given.scale is not None
    weight = given.weight.view(torch.uint16) if packed else given.weight
    rows = min(MOST_ROWS, max(32, triton.next_power_of_2(given.tokens)))
    _many[(triton.cdiv(given.tokens, rows), given.tiles(tile.outputs), out.shape[0])](
        *given.args(weight, out), OUTPUTS=tile.outputs, TOKENS=rows, STEP=STEP, AHEAD=tile.ahead,
        WIDE_AHEAD=tile.wide_ahead, PACKED=packed, CHAINED=CHAINED,
        num_warps=tile.warps, launch_pdl=CHAINED,
    )  # fmt: skip
    return out


def _wide(given: Given, outputs: int) -> Tensor:
    """[1, ..., outputs], each weight's products by the kernels of its storage."""
    x, out = given.x, given.x.new_empty((1, *given.x.shape[:-1], outputs), dtype=torch.float32)
    columns = [len(own) for own in (given.weight, given.plain, given.gates) if own is not None]
    pieces = iter(out[0].split(columns, -1))
    if given.scale is None:
        next(pieces).copy_(project_raw(x, given.weight))
    else:
        next(pieces).copy_(block_linear(x, given.weight, given.scale))
    if given.plain is not None:
        next(pieces).copy_(project_raw(x, given.plain))
    if given.gates is not None:
        next(pieces).copy_(wide_linear(x, given.gates))
    return out
