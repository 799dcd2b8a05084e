# SPDX-License-Identifier: Apache-2.0
"""How long a round takes on the machine that is simulated."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.spec import StepShape

Point = tuple[float, float]


@dataclass(frozen=True)
class RoundCost:
    """Seconds of a round: `fixed`, `per_token` of its rectangle, and `per_key` behind its rows.

    Padding counts as tokens: a rectangle costs the same however full it is. A decoding round takes
    its time from `measured` instead, if that holds anything: for each context length, seconds by
    batch; between measured points time runs straight, beyond them it stays.
    """

    fixed: float = 0.008
    per_token: float = 10e-6
    per_key: float = 1e-9
    measured: tuple[tuple[float, tuple[Point, ...]], ...] = ()

    def __post_init__(self) -> None:
        for name, value in (
            ("fixed", self.fixed),
            ("per_token", self.per_token),
            ("per_key", self.per_key),
        ):
            if isinstance(value, bool) or not 0 <= value < 1e6:
                raise ConfigError(f"{name}: must be seconds, 0 or more, got {value!r}")

    def seconds(self, shape: StepShape, keys: int) -> float:
        """Of one round; `keys`: tokens behind all of its rows together."""
        if self.measured and not shape.for_prompts:
            each = keys / shape.batch
            return straight(
                [(context, straight(points, shape.batch)) for context, points in self.measured],
                each,
            )
        tokens = shape.batch * shape.width
        return self.fixed + self.per_token * tokens + self.per_key * keys

    def of_rounds(self, shape: StepShape, keys: Sequence[int]) -> list[float]:
        """As `seconds`, for rounds of one shape."""
        if self.measured and not shape.for_prompts:
            return [self.seconds(shape, one) for one in keys]
        without, each = self.seconds(shape, 0), self.per_key
        return [without + each * one for one in keys]


def read_measured(paths: Sequence[Path]) -> tuple[tuple[float, tuple[Point, ...]], ...]:
    """What `freewheel bench decode --json` wrote: seconds by batch, for each context length.

    Raises ConfigError for a file of another form.
    """
    found: dict[float, dict[float, float]] = {}
    for path in paths:
        for run in _runs(path):
            if run.get("slow_host_ms"):
                continue
            context, batch, milliseconds = (
                _above_0(run, name, path) for name in ("context", "batch", "device_ms_per_round")
            )
            found.setdefault(context, {})[batch] = milliseconds / 1000
    if paths and not found:
        raise ConfigError("costs: no run of a host that did not sleep")
    return tuple((context, tuple(sorted(found[context].items()))) for context in sorted(found))


def _above_0(run: dict[str, Any], name: str, path: Path) -> float:
    value = run.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"costs: {path}: {name} of a run must be above 0, got {value!r}")
    return float(value)


def _runs(path: Path) -> list[dict[str, Any]]:
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except OSError as error:
        raise ConfigError(f"costs: {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"costs: {path} is not what bench decode --json writes") from error
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise ConfigError(f"costs: {path} is not what bench decode --json writes")
    return runs


def straight(points: Sequence[Point], x: float) -> float:
    """The value at `x` on straight lines between `points`, which are ordered; level beyond."""
    at = bisect_left(points, x, key=lambda point: point[0])
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (x - left) / (right - left) * (high - low)
