# SPDX-License-Identifier: Apache-2.0
"""Owns the device: builds model and state, launches rounds, carries letters up and home.

May import everything below the engine. `uplink` is the only file that copies to the device, and
`mailbox` the only one where a device value becomes an int.
"""

from __future__ import annotations

from freewheel.memory import Sizes
from freewheel.runtime.build import Built, Resolved, build, disk_indexes
from freewheel.runtime.clock import Span
from freewheel.runtime.convert import convert
from freewheel.runtime.counters import Counters
from freewheel.runtime.executor import Executor
from freewheel.runtime.follow import follow_local, join
from freewheel.runtime.kernel_bench import KernelTime, PeerTime, bench_kernels, choose_cells
from freewheel.runtime.machine import Machine
from freewheel.runtime.outline import outline
from freewheel.runtime.parallel import kill_ranks
from freewheel.runtime.planning import GpuPlan, plan_gpus
from freewheel.runtime.steady import SteadyCounts, SteadyDecode, SteadyRun
from freewheel.runtime.survey import Survey, survey, verify
from freewheel.runtime.tracing import DeviceTrace, covered, traced

__all__ = [
    "Built",
    "Counters",
    "DeviceTrace",
    "Executor",
    "GpuPlan",
    "KernelTime",
    "Machine",
    "PeerTime",
    "Resolved",
    "Sizes",
    "Span",
    "SteadyCounts",
    "SteadyDecode",
    "SteadyRun",
    "Survey",
    "bench_kernels",
    "build",
    "choose_cells",
    "convert",
    "covered",
    "disk_indexes",
    "follow_local",
    "join",
    "kill_ranks",
    "outline",
    "plan_gpus",
    "survey",
    "traced",
    "verify",
]
