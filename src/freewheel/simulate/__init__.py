# SPDX-License-Identifier: Apache-2.0
"""The scheduler and the caches against a device that only counts: planning without a machine.

May import `freewheel.config`, `.memory`, `.spec` and `.host`. Must never import torch or numpy.
"""

from __future__ import annotations

from freewheel.simulate.costs import RoundCost, read_measured
from freewheel.simulate.make import Made, make
from freewheel.simulate.plan import UNLIMITED, Simulation, default_cache, simulation
from freewheel.simulate.replay import Outcome, Replay
from freewheel.simulate.report import report
from freewheel.simulate.trace import Call, Trace, read_trace, write_trace

__all__ = [
    "UNLIMITED",
    "Call",
    "Made",
    "Outcome",
    "Replay",
    "RoundCost",
    "Simulation",
    "Trace",
    "default_cache",
    "make",
    "read_measured",
    "read_trace",
    "report",
    "simulation",
    "write_trace",
]
