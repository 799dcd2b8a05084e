# SPDX-License-Identifier: Apache-2.0
"""Faster bodies for one CPU thread. Like kernels, they may read lengths and skip what is dead."""

from freewheel.ops.cpu import (
    attention,
    cache,
    choosing,
    clamped,
    compressed,
    dense,
    hyper,
    latents,
    quantised,
    sinks,
)

__all__ = [
    "attention",
    "cache",
    "choosing",
    "clamped",
    "compressed",
    "dense",
    "hyper",
    "latents",
    "quantised",
    "sinks",
]
