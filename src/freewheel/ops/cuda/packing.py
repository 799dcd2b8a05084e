# SPDX-License-Identifier: Apache-2.0
"""FP8 codes and scales of rows on their way into a packed cache.

A tile's NaN lies in its scale: kernels that read turn codes into numbers by their bits alone, for
which the code of NaN is 480.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def largest_of(values, axis: tl.constexpr):
    """The largest magnitude along `axis` of float32 values; NaN if there is one."""
    size = tl.abs(values)
    unknown = tl.max((values != values).to(tl.int32), axis)
    return tl.where(unknown > 0, float("nan"), tl.max(size, axis))


@triton.jit
def tile_scale(largest):
    """float32: as `ops.rows.quantise_tiles`."""
    scale = tl.div_rn(largest, tl.full((), 448.0, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    return tl.where(largest == 0, 1.0, scale)


@triton.jit
def power_code(largest):
    """int32: E8M0 as `ops.rows.quantise_powers`."""
    least = tl.div_rn(largest, tl.full((), 448.0, tl.float32))
    least = tl.where(least < 1.1754943508222875e-38, 1.1754943508222875e-38, least)
    bits = least.to(tl.int32, bitcast=True)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.minimum(code, 255)  # of infinity and NaN


@triton.jit
def power_of(code):
    """float32: 2^(code - 127) of int32 codes above 0; NaN of 255."""
    bits = tl.where(code == 255, 0x7FC00000, code << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def codes_of(scaled):
    """uint8: the nearest e4m3 of float32 within 448, ties to even.

    By bits, which round alike on every machine. Below 2^-6 codes are steps of 2^-9: adding 2^14
    leaves just those.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    fine = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    coarse = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0x3C800000, fine, tl.minimum(coarse, 0x7E))
    return (sign | code).to(tl.uint8)


def views(cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same memory as bytes, as bfloat16 and as float32."""
    flat = cache.view(-1)
    return flat, flat.view(torch.bfloat16), flat.view(torch.float32)
