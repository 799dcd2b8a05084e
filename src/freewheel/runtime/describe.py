# SPDX-License-Identifier: Apache-2.0
"""An engine's description as text, from which another rank builds the same one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from freewheel.config import EngineConfig
from freewheel.spec.shape import ShapeLadder, StepShape


def describe(config: EngineConfig, ladder: ShapeLadder, mean: float | None) -> str:
    """JSON of what `build` is asked for."""
    plain = replace(config, model=str(config.model))
    return json.dumps({"config": asdict(plain), "ladder": asdict(ladder), "mean": mean})


def read_description(text: str) -> tuple[EngineConfig, ShapeLadder, float | None]:
    """What `describe` wrote."""
    found = json.loads(text)
    ladder = found["ladder"]
    decode = tuple(StepShape(**shape) for shape in ladder["decode"])
    prefill = tuple((batch, width) for batch, width in ladder["prefill"])
    rectangles = ShapeLadder(decode, prefill, ladder["depth"], ladder["lag"])
    options = {name: _option(value) for name, value in found["config"].items()}
    return EngineConfig(**options), rectangles, found["mean"]


def _option(value: Any) -> Any:
    """JSON has lists alone."""
    return tuple(value) if isinstance(value, list) else value
