# SPDX-License-Identifier: Apache-2.0
"""Single ops beside other projects' kernels: one row a size."""

from __future__ import annotations

from typing import Any

from freewheel.engine import KernelTime


def kernel_summary(found: KernelTime) -> dict[str, Any]:
    """Figures of one cell. Times in microseconds; `ratio`: ours over the best peer's.

    `deterministic_us`: ours in the deterministic mode.

    `error`: norm of the difference from the specification over its norm; of picks, how many differ.
    """
    return {
        "op": found.op,
        "cell": found.cell,
        "us": round(found.us, 2),
        "deterministic_us": round(found.fixed_us, 2),
        "floor_us": round(found.floor_us, 2),
        "over_floor": round(found.us / found.floor_us, 2),
        "ratio": None if found.ratio is None else round(found.ratio, 3),
        "error": found.error,
        "peers": {
            peer.name: {"us": None, "reason": peer.reason}
            if peer.us is None
            else {"us": round(peer.us, 2)}
            for peer in found.peers
        },
    }
