# SPDX-License-Identifier: Apache-2.0
"""Bodies for CUDA devices, in Triton. Importing this package registers them.

One file a family. Each body agrees with its specification up to rounding, and:

- reads lengths, rows and pages itself, on the device, so that work ends where a row ends;
- sums in an order that depends on no batch, no width and no neighbour (`sparse_mla` if told to);
- leaves float64 to the specification, which runs on any device.
"""

from freewheel.ops.cuda import (
    adjusting,
    attention,
    block_experts,
    cache,
    choosing,
    clamped,
    compiling,
    constraining,
    crossing,
    dense,
    entries,
    experts,
    guiding,
    hyper,
    indexing,
    keys,
    latents,
    linear,
    lookup,
    mxfp4_experts,
    packed,
    packed_attention,
    packed_keys,
    packed_sinks,
    placing,
    quantised,
    rounds,
    scoring,
    selection,
    sharing,
    sight,
    sinks,
)

__all__ = [
    "adjusting",
    "attention",
    "block_experts",
    "cache",
    "choosing",
    "clamped",
    "compiling",
    "constraining",
    "crossing",
    "dense",
    "entries",
    "experts",
    "guiding",
    "hyper",
    "indexing",
    "keys",
    "latents",
    "linear",
    "lookup",
    "mxfp4_experts",
    "packed",
    "packed_attention",
    "packed_keys",
    "packed_sinks",
    "placing",
    "quantised",
    "rounds",
    "scoring",
    "selection",
    "sharing",
    "sight",
    "sinks",
]
