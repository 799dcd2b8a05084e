# SPDX-License-Identifier: Apache-2.0
"""Norms of the residual stream, and the rotary tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel import ops
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.spec.model import RopeSpec, YarnSpec


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm with a weight."""

    weight: Tensor  # float [H]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:  # [..., H] -> [..., H]
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum) of x and residual [..., H]; at the bottom of the stack, sum is x."""
        if residual is None:
            return self(x), x
        normed, total = ops.add_rms_norm(x, residual, self.weight, self.eps)
        return normed, total


def load_norm(source: WeightSource, name: str, width: int, eps: float) -> Norm:
    """`name`.weight [width]."""
    return Norm(source.tensor(f"{name}.weight", (width,)), eps)


def load_wide_norm(source: WeightSource, name: str, width: int, eps: float) -> Norm:
    """As `load_norm`, but the weight stays in float32."""
    return Norm(source.tensor(f"{name}.weight", (width,), wide_dtype(source.dtype)), eps)


def rope_table(rope: RopeSpec, positions: int, device: torch.device) -> Tensor:
    """float32 [positions, rope.dim]: cosines of every pair's angle at a position, then sines.

    The angle of pair i is position * theta^(-2i/dim) (arXiv:2104.09864), stretched by YaRN where
    the spec says so. Angles are rounded to float32, as in transformers and in training.
    """
    if device.type == "meta":  # no values; and `arange` there would load PyTorch's compiler
        return torch.empty((positions, rope.dim), dtype=torch.float32, device=device)
    frequencies = _frequencies(rope, device)  # float32 [dim / 2]
    steps = torch.arange(positions, dtype=torch.float32, device=device)
    angles = steps[:, None] * frequencies  # float32 [T, dim / 2]
    factor = 1.0 if rope.yarn is None else rope.yarn.cos_sin_factor
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def _frequencies(rope: RopeSpec, device: torch.device) -> Tensor:
    """float32 [dim / 2]: radians a position, per pair."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim
    periods = rope.theta**exponents
    if rope.yarn is None:
        return 1.0 / periods
    kept = _kept_share(rope, rope.yarn, device)
    return (1.0 / (rope.yarn.factor * periods)) * (1 - kept) + (1.0 / periods) * kept


def _kept_share(rope: RopeSpec, yarn: YarnSpec, device: torch.device) -> Tensor:
    """float32 [dim / 2]: 1 where a pair turns fast enough to keep its frequency, 0 where it is
    stretched by the whole factor, a ramp between (YaRN, arXiv:2309.00071, section 3.2)."""
    low = _pair_turning(rope, yarn, yarn.beta_fast)
    high = _pair_turning(rope, yarn, yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32, device=device)
    return 1 - ((pairs - low) / (high - low)).clamp(0, 1)


def _pair_turning(rope: RopeSpec, yarn: YarnSpec, turns: float) -> float:
    """Which pair, as a real number, turns `turns` times over the original context."""
    period = yarn.original_positions / (turns * 2 * math.pi)
    return rope.dim * math.log(period) / (2 * math.log(rope.theta))
