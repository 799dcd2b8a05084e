# SPDX-License-Identifier: Apache-2.0
"""What kernels share whose layouts and waits are written out (Gluon, a part of Triton)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

try:
    from triton.experimental.gluon.language import barrier
except ImportError:  # its name before Triton 3.7
    from triton.experimental.gluon.language import thread_barrier as barrier

__all__ = [
    "barrier",
    "follow",
    "last_live",
    "release",
    "slots_at",
    "wait",
    "weights",
    "widen_fp8",
]


@gluon.jit
def follow(CHAINED: gl.constexpr):
    """As `chain.follow`."""
    if CHAINED:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def wait(CHAINED: gl.constexpr):
    """As `chain.wait`."""
    if CHAINED:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def release(CHAINED: gl.constexpr):
    """As `chain.release`."""
    if CHAINED:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def widen_fp8(codes):
    """uint8 codes of e4m3 -> their values as bfloat16: see `streaming.raw_fp8`."""
    raw = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 high, low;
        shr.u32 high, $2, 4;
        shl.b32 low, $2, 4;
        and.b32 high, high, 0x07070707;
        and.b32 low, low, 0xf0f0f0f0;
        lop3.b32 high, $2, 0x80808080, high, 0xea;
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
        }
        """,
        "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip
    return raw * gl.full(raw.shape, 2.0**120, gl.bfloat16, raw.type.layout)


@gluon.jit
def last_live(own_slots, part, LANES, K, SPAN: gl.constexpr, layout: gl.constexpr):
    """The lane behind the last one of a run that names a slot; 0 if none does."""
    run = part * LANES + gl.arange(0, SPAN, layout)
    live = gl.load(own_slots + run, mask=run < gl.minimum((part + 1) * LANES, K), other=-1) >= 0
    return gl.max(gl.where(live, run + 1, 0), 0)


@gluon.jit
def weights(score, high):
    """Weights by the highest score so far, what earlier ones shrink by, and that score."""
    highest = gl.maximum(high, gl.max(score, 1))
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    return gl.exp(score - shift[:, None]), gl.exp(high - shift), highest


@gluon.jit
def slots_at(own_slots, lane, stop):
    """-1 behind `stop`."""
    return gl.load(own_slots + lane, mask=lane < stop, other=-1)
