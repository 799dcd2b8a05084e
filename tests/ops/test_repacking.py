# SPDX-License-Identifier: Apache-2.0
"""MXFP4 numbers in the order in which warps read them are the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS, repack_mxfp4, repackable
from freewheel.ops.repacking import CODES, INPUTS, PIECE, ROWS, unpack_pieces
from tests.ops.cases import Sizes, generator
from tests.ops.quantised_cases import expert_arguments, repacked, shared_blocks


def drawn(experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Every byte is a number, of codes and of scales."""
    chance = generator(outputs)
    codes = torch.randint(256, (experts, outputs, inputs // 2), generator=chance).to(torch.uint8)
    scale = torch.randint(256, (experts, outputs, inputs // 32), generator=chance)
    return codes, scale.to(torch.uint8)


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 128), (96, 384), (64, 256)])
def test_what_was_repacked_is_found_again(outputs: int, inputs: int, halves: bool) -> None:
    codes, scale = drawn(3, outputs, inputs)
    pieces = repack_mxfp4(codes, scale, halves)
    assert pieces.shape == (3, outputs // ROWS, inputs // INPUTS, PIECE)
    assert pieces.numel() == codes.numel() + scale.numel()
    for own, wanted in zip(pieces, zip(codes, scale, strict=True), strict=True):
        assert all(map(torch.equal, unpack_pieces(own, halves), wanted))


@pytest.mark.parametrize("halves", [True, False])
def test_a_lane_s_bytes_are_those_of_its_row_and_inputs(halves: bool) -> None:
    """By the codes of one row's quarter of 128 inputs alone, and by its scale."""
    row, quarter = (32 + 21, 2) if halves else (16 * 2 + 2 * 5 + 1, 2)
    codes, scale = torch.zeros(1, 64, 128, dtype=torch.uint8), torch.zeros(1, 64, 8).byte()
    codes[0, row, 64 + 16 * quarter : 64 + 16 * (quarter + 1)] = 255
    scale[0, row, 4 + quarter] = 9
    pieces = repack_mxfp4(codes, scale, halves)[0]
    lane = 4 * 5 + quarter
    assert (pieces[2, 1, 512 + 16 * lane : 512 + 16 * (lane + 1)] == 255).all()
    assert pieces[2, 1, CODES + 2 * lane + 1] == 9
    assert pieces.count_nonzero() == 17


def test_a_turn_and_a_mask_give_two_inputs() -> None:
    """As the kernels read a word: signs and sizes where bfloat16 has them."""
    codes = torch.arange(16).repeat(8, 1).int()
    codes = torch.stack([codes[i].roll(3 * i) for i in range(8)], 1)  # [16, 8]: a word's codes
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)  # [16, 4]
    rows = packed.repeat(1, 16)[None]  # [1, 16, 64]: 128 inputs
    scale = torch.full((1, 16, 4), 127, dtype=torch.uint8)
    pieces = repack_mxfp4(rows, scale, True)[0, 0, 0, :CODES]
    words = pieces.view(torch.int32).view(2, 8, 4, 4)[:, :, 0, 0].flatten().long() & 0xFFFFFFFF
    mask = 0x81C081C0

    def turned(by: int) -> Tensor:
        return (words >> by | words << 32 - by) & mask

    last = (words & 0x001B001B) * 0x4108 & mask
    for pair, found in enumerate((words & mask, turned(6), turned(3), last)):
        for half in range(2):
            code = codes[:, 2 * pair + half].long()
            assert torch.equal(found >> 16 * half & 0xFFFF, (code & 8) << 12 | (code & 7) << 6)


def test_only_whole_pieces_are_repackable() -> None:
    assert repackable(32, 256)
    assert not repackable(40, 256) and not repackable(32, 192)


@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_those_that_were_repacked(shared: bool) -> None:
    args = expert_arguments("mxfp4_experts", Sizes(2, 3), 4, 128, 256, 2, 0.3)
    args = (*args, *shared_blocks(5, 128, 256)) if shared else args
    expected = SPECIFICATIONS["mxfp4_experts"](*args)
    assert torch.equal(SPECIFICATIONS["repacked_experts"](*repacked(args)), expected)


def test_nothing_is_computed_of_tensors_without_values() -> None:
    codes, scale = (t.to("meta") for t in drawn(2, 32, 128))
    assert repack_mxfp4(codes, scale, False).shape == (2, 2, 1, PIECE)
