# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts in the order in which a GPU's warps read them, and the op that runs them so.

A piece is 16 rows of 128 inputs: 1,024 bytes of codes and 64 of scales, one behind the other. Lane
4 * g + q of a warp has 16 bytes of row g of the piece, which are its inputs 32 * q to 32 * q + 31,
512 bytes further on as many of row 8 + g, and behind all codes the scales of both. So what a warp
reads at once lies together, and every lane reads fragments of a matrix instruction as they are
(PTX ISA, "mma.m16n8k16", with inputs in another order, as tokens have them).

Rows g and 8 + g are a gate and the up of the same output; in the projection behind them they are
neighbours. Within a word of eight codes, bits lie so that a turn and a mask give two neighbouring
inputs as bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.codecs import GROUP, dequantise_mxfp4
from freewheel.ops.quantised import Weights, fake_experts, sum_experts, with_shared
from freewheel.ops.registry import op

ROWS, INPUTS = 16, 128
"""Of a piece."""

CODES = ROWS * INPUTS // 2
"""Bytes of its codes."""

PIECE = CODES + ROWS * INPUTS // GROUP
"""Bytes of a piece."""

PLACES = (
    (6, 7, 8, 15), (22, 23, 24, 31), (12, 13, 14, 21), (28, 29, 30, 5),
    (9, 10, 11, 18), (25, 26, 27, 2), (3, 4, 0, 1), (19, 20, 16, 17),
)  # fmt: skip
"""Where the bits of a word's eight codes lie, each code's mantissa first and its sign last."""


TOGETHER = 32
"""Experts that are repacked at a time."""


def _moves() -> dict[int, int]:
    """How far bits move up -> a mask of those bits, where they lie before."""
    masks: dict[int, int] = {}
    for code, places in enumerate(PLACES):
        for bit, place in enumerate(places):
            at = 4 * code + bit
            masks[place - at] = masks.get(place - at, 0) | 1 << at
    return masks


def _signed(mask: int) -> int:
    """The int32 of the same bits."""
    return mask - (1 << 32) if mask >> 31 else mask


def _moved(words: Tensor, moves: dict[int, int]) -> Tensor:  # int32 [...] -> int32 [...]
    total = torch.zeros_like(words)
    for by, mask in moves.items():
        if by < 0:
            total |= (words >> -by) & _signed(mask >> -by)
        else:
            total |= (words & _signed(mask)) << by
    return total


def repackable(outputs: int, inputs: int) -> bool:
    """Whether a matrix [outputs, inputs] falls into whole pieces."""
    return outputs % ROWS == 0 and inputs % INPUTS == 0


def repack_mxfp4(
    codes: Tensor,  # uint8 [E, N, K / 2]  two e2m1 a byte, the low nibble first
    scale: Tensor,  # uint8 [E, N, K / 32]  E8M0
    halves: bool,
) -> Tensor:  # uint8 [E, N / 16, K / 128, 1088]
    """The same numbers in pieces, of a matrix that is `repackable`.

    `halves`: rows are all gates, then all ups, and a piece has eight of each. Runs once, where
    weights are loaded.
    """
    count, rows, half = codes.shape
    out = codes.new_empty((count, rows // ROWS, 2 * half // INPUTS, PIECE))
    if codes.device.type == "meta":
        return out  # there is nothing to move
    words = codes.contiguous().view(torch.int32)  # [E, N, K / 8]
    chunks = out.shape[2]
    for at in range(0, count, TOGETHER):
        some, own = slice(at, at + TOGETHER), out[at : at + TOGETHER]
        bits = _moved(words[some], _moves()).unflatten(-1, (chunks, 4, 4))
        bits = _rows_apart(bits, halves).permute(0, 1, 4, 2, 3, 5, 6)  # E, tile, chunk, half, g, ..
        own[..., :CODES] = bits.contiguous().view(torch.uint8).flatten(3)
        factors = _rows_apart(scale[some].unflatten(-1, (chunks, 4)), halves)
        own[..., CODES:] = factors.permute(0, 1, 4, 3, 5, 2).flatten(3)
    return out


def _rows_apart(rows: Tensor, halves: bool) -> Tensor:  # [E, N, ...] -> [E, N / 16, 2, 8, ...]
    if halves:
        return rows.unflatten(1, (2, -1, 8)).transpose(1, 2)
    return rows.unflatten(1, (-1, 8, 2)).transpose(2, 3)


def _rows_together(rows: Tensor, halves: bool) -> Tensor:  # [N / 16, 2, 8, ...] -> [N, ...]
    if halves:
        return rows.transpose(0, 1).flatten(0, 2)
    return rows.transpose(1, 2).flatten(0, 2)


def unpack_pieces(
    pieces: Tensor,  # uint8 [N / 16, K / 128, 1088]
    halves: bool,
) -> tuple[Tensor, Tensor]:
    """(codes uint8 [N, K / 2], scale uint8 [N, K / 32]) as `repack_mxfp4` took them."""
    tiles, chunks, _ = pieces.shape
    bits = pieces[..., :CODES].contiguous().view(torch.int32).view(tiles, chunks, 2, 8, 4, 4)
    back = {-by: _shifted(mask, by) for by, mask in _moves().items()}
    words = _moved(_rows_together(bits.permute(0, 2, 3, 1, 4, 5), halves).contiguous(), back)
    factors = pieces[..., CODES:].reshape(tiles, chunks, 8, 4, 2).permute(0, 4, 2, 1, 3)
    scale = _rows_together(factors, halves).flatten(1)
    return words.flatten(1).view(torch.uint8), scale


def _shifted(mask: int, by: int) -> int:
    return mask << by if by >= 0 else mask >> -by


@op(
    "repacked_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, "
    "float? limit=None, Tensor? shared_gate_up=None, Tensor? shared_gate_up_scale=None, "
    "Tensor? shared_down=None, Tensor? shared_down_scale=None, bool fixed=False) -> Tensor",
    fake=fake_experts,
)
def repacked_experts(
    x: Tensor,  # float [..., H]
    gate_up: Tensor,  # uint8 [E, 2I / 16, H / 128, 1088]  of halves
    down: Tensor,  # uint8 [E, H / 16, I / 128, 1088]
    ids: Tensor,  # int32 [..., top_k]  -1: of nobody
    weights: Tensor,  # float [..., top_k]
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,  # float8_e4m3fn [2J, H]
    shared_gate_up_scale: Tensor | None = None,  # float32 [2 * ceil(J / 128), ceil(H / 128)]
    shared_down: Tensor | None = None,  # float8_e4m3fn [H, J]
    shared_down_scale: Tensor | None = None,  # float32 [ceil(H / 128), ceil(J / 128)]
    fixed: bool = False,
) -> Tensor:  # [..., H]
    """`mxfp4_experts` of weights that `repack_mxfp4` has put in pieces."""
    of = repacked_weights(gate_up, down)
    shared = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return with_shared(sum_experts, x, gate_up.shape[0], of, ids, weights, limit, shared)


def repacked_weights(gate_up: Tensor, down: Tensor) -> Weights:
    """Of repacked experts; the arguments are those of `repacked_experts`."""

    def of(expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            dequantise_mxfp4(*unpack_pieces(gate_up[expert], halves=True), dtype),
            dequantise_mxfp4(*unpack_pieces(down[expert], halves=False), dtype),
        )

    return of
