# SPDX-License-Identifier: Apache-2.0
"""Packed keys on their way through registers: codes are widened there, once for both products.

Blocks are powers of two and a key has seven tiles, so a thread loads four, two and one of a row, 16
codes at a time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _byte_layout(tiles: int) -> gl.BlockedLayout:
    """Codes [STEP, tiles of 64, 4, 16]: eight rows a warp, all tiles of one in each of its four
    threads."""
    return gl.BlockedLayout([1, tiles, 1, 16], [8, 1, 4, 1], [8, 1, 1, 1], [3, 2, 1, 0])


BYTES_4 = gl.constexpr(_byte_layout(4))
BYTES_2 = gl.constexpr(_byte_layout(2))
BYTES_1 = gl.constexpr(_byte_layout(1))
# The thread that loads codes of a row copies its rotated part as well.
TAILS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))


@gluon.jit
def _widen(codes, scale):
    """bfloat16 of e4m3 codes times powers of two, bfloat16: exact, see `streaming.raw_fp8`."""
    codes, scale = gl.broadcast(codes, scale)
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 high, low, one, two, size;
        mov.b32 size, 0x7b807b80;
        shr.u32 high, $2, 4;
        shl.b32 low, $2, 4;
        and.b32 high, high, 0x07070707;
        and.b32 low, low, 0xf0f0f0f0;
        lop3.b32 high, $2, 0x80808080, high, 0xea;
        prmt.b32 one, low, high, 0x5140;
        prmt.b32 two, low, high, 0x7362;
        mul.rn.bf16x2 one, one, size;
        mul.rn.bf16x2 two, two, size;
        mul.rn.bf16x2 $0, one, $3;
        mul.rn.bf16x2 $1, two, $4;
        }
        """,
        "=r,=r,r,r,r", [codes, scale], dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _piece(
    codes, at, behind, live, FIRST: gl.constexpr, TILES: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Codes [STEP, TILES, 4, 16] of packed keys from tile FIRST on, and their scales bfloat16
    [STEP, TILES]; zeros of dead lanes. `at`, `behind`: where codes and scales begin."""
    flat: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
    row: gl.constexpr = gl.SliceLayout(1, flat)
    at = gl.convert_layout(at, row, assert_trivial=True)
    behind = gl.convert_layout(behind, row, assert_trivial=True)
    live = gl.convert_layout(live, row, assert_trivial=True)
    tile = FIRST + gl.arange(0, TILES, gl.SliceLayout(0, flat))
    chunk = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    inner = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    column = tile[None, :, None, None] * 64 + chunk[None, None, :, None] * 16
    place = at[:, None, None, None] + column + inner[None, None, None, :]
    code = gl.load(codes + place, mask=live[:, None, None, None], other=0)
    power = gl.load(codes + behind[:, None] + tile[None, :], mask=live[:, None], other=0)
    power = power.to(gl.int16)
    power = gl.where(power == 255, 0x7FC0, power << 7).to(gl.int16)
    return code, power.to(gl.bfloat16, bitcast=True)


@gluon.jit
def load_codes(codes, at, behind, slot):
    """What `_piece` gives, of all seven tiles of rows whose codes begin at `at`."""
    live = slot >= 0
    return (
        _piece(codes, at, behind, live, 0, 4, BYTES_4),
        _piece(codes, at, behind, live, 4, 2, BYTES_2),
        _piece(codes, at, behind, live, 6, 1, BYTES_1),
    )


@gluon.jit
def keep(found, values):
    """Store what `load_codes` found, widened, in front of the rotated parts."""
    _keep_piece(found[0], values.slice(0, 256, dim=1))
    _keep_piece(found[1], values.slice(256, 128, dim=1))
    _keep_piece(found[2], values.slice(384, 64, dim=1))


@gluon.jit
def _keep_piece(piece, values):
    code, scale = piece
    values.store(gl.reshape(_widen(code, scale[:, :, None, None]), values.shape))
