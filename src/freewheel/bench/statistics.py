# SPDX-License-Identifier: Apache-2.0
"""Means and quantiles, as numbers under vLLM's keys."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile in milliseconds; None of no values."""
    values = sorted(1000 * value for value in seconds)
    return {
        f"mean_{name}_ms": statistics.fmean(values) if values else None,
        f"median_{name}_ms": quantile(values, 0.5),
        f"p99_{name}_ms": quantile(values, 0.99),
    }


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the values lie, interpolated linearly between neighbours.

    NumPy's default (type 7 of Hyndman and Fan, 1996). Of few values a high quantile is little more
    than the largest.
    """
    if not ascending:
        return None
    place = share * (len(ascending) - 1)
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (place - below) * (ascending[above] - ascending[below])
