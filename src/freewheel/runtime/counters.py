# SPDX-License-Identifier: Apache-2.0
"""What crossed between host and device, counted where it crosses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Since the executor was made. `uploads` and `downloads` are copies of letters.

    `late_captures`: graphs made after `Executor.capture` said that all were there.
    `late_kernels`: kernels compiled, or loaded from disk, after that.
    """

    rounds: int = 0
    uploads: int = 0
    downloads: int = 0
    graph_launches: int = 0
    late_captures: int = 0
    late_kernels: int = 0
