# SPDX-License-Identifier: Apache-2.0
"""Faster bodies for one CPU thread. Like kernels, they may read lengths and skip what is dead."""

from freewheel.ops.cpu import (
    adjusting,
    attention,
    cache,
    checksums,
    choosing,
    clamped,
    compressed,
    constraining,
    dense,
    guiding,
    hyper,
    latents,
    openings,
    packed,
    quantised,
    reading,
    sinks,
    steps,
)

__all__ = [
    "adjusting",
    "attention",
    "cache",
    "checksums",
    "choosing",
    "clamped",
    "compressed",
    "constraining",
    "dense",
    "guiding",
    "hyper",
    "latents",
    "openings",
    "packed",
    "quantised",
    "reading",
    "sinks",
    "steps",
]
