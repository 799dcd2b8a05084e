# SPDX-License-Identifier: Apache-2.0
"""How quantised weights are stored: FP8 (e4m3) in scaled blocks, and MXFP4 (e2m1) in groups of 32.

Formats: DeepSeek-V3 (arXiv:2412.19437, 3.3) for blocks, OCP Microscaling 1.0 for MXFP4 and E8M0.
Quantising is for `convert` and for tests: it looks at values, so it belongs on the host's side of
loading. Dequantising reads nothing and runs in any graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.errors import CheckpointError

BLOCK = 128
"""Rows and columns that one scale of an FP8 weight covers, unless said otherwise."""

GROUP = 32
"""Inputs that one scale of an MXFP4 weight covers."""

FP8_MOST, FP4_MOST = 448.0, 6.0
"""The largest finite values of e4m3 and of e2m1."""

E8M0_NAN = 255


def blocks(size: int, block: int = BLOCK) -> int:
    """Blocks that cover `size`; the last may be partly empty."""
    return -(-size // block)


def spread(
    scale: Tensor,  # [..., ceil(N / block_n), ceil(K / block_k)]
    outputs: int,
    inputs: int,
    block_n: int = BLOCK,
    block_k: int = BLOCK,
) -> Tensor:  # [..., N, K]
    """Each block's scale at each of its elements."""
    rows = scale.repeat_interleave(block_n, -2)[..., :outputs, :]
    return rows.repeat_interleave(block_k, -1)[..., :inputs]


def dequantise_blocks(
    weight: Tensor,  # float8_e4m3fn [..., N, K]
    scale: Tensor,  # float [..., ceil(N / block_n), ceil(K / block_k)]
    block_n: int = BLOCK,
    block_k: int = BLOCK,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # dtype [..., N, K]
    """Value times its block's scale. In float32 and wider the product is the only rounding."""
    outputs, inputs = weight.shape[-2:]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factors = spread(scale.to(wide), outputs, inputs, block_n, block_k)
    return (weight.to(wide) * factors).to(dtype)


def quantise_blocks(
    weight: Tensor,  # float [..., N, K]
    block_n: int = BLOCK,
    block_k: int = BLOCK,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [..., N, K], float32 scale [..., ceil(N / block_n), ceil(K / block_k)]).

    A block's scale maps its largest magnitude to 448; `power_of_two` rounds the scale up to a
    power of two (`scale_fmt: ue8m0`). A block of zeros has scale 1. Ties round to even.

    Raises CheckpointError if a value is not finite.
    """
    _require_finite(weight)
    outputs, inputs = weight.shape[-2:]
    rows, columns = blocks(outputs, block_n), blocks(inputs, block_k)
    wide = weight.double()
    padded = wide.new_zeros(*weight.shape[:-2], rows * block_n, columns * block_k)
    padded[..., :outputs, :inputs] = wide
    tiled = padded.unflatten(-1, (columns, block_k)).unflatten(-3, (rows, block_n))
    scale = _scale_for(tiled.abs().amax((-3, -1)), FP8_MOST, power_of_two)
    factors = spread(scale.double(), outputs, inputs, block_n, block_k)
    scaled = (wide / factors).clamp(-FP8_MOST, FP8_MOST)
    return scaled.float().to(torch.float8_e4m3fn), scale


def _scale_for(largest: Tensor, most: float, power_of_two: bool) -> Tensor:
    """float32: the least scale (power of two) at which `largest` float64 is at most `most`."""
    scale = (largest / most).to(torch.float32)
    if power_of_two:
        scale = decode_e8m0(encode_e8m0(largest / most))
    return torch.where(largest > 0, scale.clamp(min=2.0**-126), torch.ones_like(scale))


def _require_finite(weight: Tensor) -> None:
    if not bool(weight.isfinite().all()):
        raise CheckpointError("weight: holds NaN or infinity, which cannot be quantised; mend it")


def decode_e8m0(codes: Tensor) -> Tensor:  # uint8 [...] -> float32 [...]
    """2^(code - 127); code 255 is NaN (OCP Microscaling 1.0, 5.4.1)."""
    wide = codes.view(torch.uint8).to(torch.int32)
    bits = wide << 23
    bits = bits.masked_fill(wide == 0, 1 << 22)  # 2^-127, a subnormal number
    return bits.masked_fill(wide == E8M0_NAN, 0x7FC00000).view(torch.float32)


def encode_e8m0(values: Tensor) -> Tensor:  # float [...] -> uint8 [...]
    """The code of the least power of two that is at least the value; of 0, the code of 2^-127."""
    mantissa, exponent = torch.frexp(values.double())  # values = mantissa * 2^exponent
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    exponent = exponent.masked_fill(values == 0, -127)
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:  # uint8 [...] below 16 -> float32 [...]
    """0, .5, 1, 1.5, 2, 3, 4, 6 for codes 0 to 7, the same negated for 8 to 15."""
    wide = codes.to(torch.int32)
    exponent, half = (wide >> 1) & 3, (wide & 1).to(torch.float32) * 0.5
    powers = (1 << (exponent - 1).clamp(min=0)).to(torch.float32)
    value = torch.where(exponent == 0, half, (1 + half) * powers)
    return torch.where(wide < 8, value, -value)


def encode_e2m1(values: Tensor) -> Tensor:  # float [...] -> uint8 [...] below 16
    """The nearest code, ties to the even one; beyond 6 it stays 6."""
    size = values.double().abs()
    low = (size * 2).round()  # steps of 0.5 up to 2
    middle, high = size.round() + 2, (size / 2).round() + 4  # of 1 up to 4, then of 2
    code = torch.where(size < 2, low, torch.where(size < 4, middle, high)).clamp(max=7)
    return (code + 8 * values.signbit()).to(torch.uint8)


def unpack_fp4(packed: Tensor) -> Tensor:  # uint8 [..., K / 2] -> float32 [..., K]
    """Two e2m1 a byte, the low nibble first."""
    bits = packed.view(torch.uint8)
    return decode_e2m1(torch.stack((bits & 15, bits >> 4), -1).flatten(-2))


def dequantise_mxfp4(
    packed: Tensor,  # uint8 [..., N, K / 2]
    scale: Tensor,  # uint8 [..., N, K / 32]  E8M0
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # dtype [..., N, K]
    """Value times 2^(code - 127) of its group of 32 inputs; exact in float32 and wider."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = unpack_fp4(packed).to(wide).unflatten(-1, (-1, GROUP))
    return (values * decode_e8m0(scale).to(wide)[..., None]).flatten(-2).to(dtype)


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:  # float [..., N, K], K % 32 == 0
    """(uint8 [..., N, K / 2] two values a byte, uint8 [..., N, K / 32] E8M0 scales).

    A group's scale is the least power of two at which no value exceeds 6, so none saturates. A
    group of zeros has scale 1.

    Raises CheckpointError if K is not a multiple of 32 or a value is not finite.
    """
    if weight.shape[-1] % GROUP:
        raise CheckpointError(f"weight: {weight.shape[-1]} inputs are no multiple of {GROUP}")
    _require_finite(weight)
    groups = weight.double().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    scale = encode_e8m0(largest / FP4_MOST).masked_fill(largest == 0, 127)
    codes = encode_e2m1(groups / decode_e8m0(scale).double()[..., None]).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale
