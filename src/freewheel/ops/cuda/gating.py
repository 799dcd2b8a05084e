# SPDX-License-Identifier: Apache-2.0
"""What lies between an expert's two projections, in every kernel of quantised experts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate(gate_value, up_value, limit, CLAMP: tl.constexpr):
    """silu(gate) * up, clamped as `clamped_silu_mul` does."""
    if CLAMP:
        gate_value = tl.where(gate_value > limit, limit, gate_value)
        up_value = tl.where(up_value > limit, limit, up_value)
        up_value = tl.where(up_value < -limit, -limit, up_value)
    return gate_value / (1 + tl.exp(-gate_value)) * up_value
