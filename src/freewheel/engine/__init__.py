# SPDX-License-Identifier: Apache-2.0
"""The loop: requests in, text out.

May import `freewheel.config`, `.spec`, `.host` and `.runtime`. Must never touch a tensor.
"""

from __future__ import annotations

from freewheel.engine.arguments import Prompt
from freewheel.engine.handoffs import HandoffLoad
from freewheel.engine.llm import LLM, ONE_TOKEN
from freewheel.engine.output import Arrival, Chunk, Logprobs, Metrics, Output, Piece, Selection
from freewheel.engine.reader import Reader, Reading
from freewheel.engine.timeline import RoundTimes
from freewheel.engine.token_engine import (
    CanaryLoad,
    DiskLoad,
    Load,
    PoolLoad,
    TierLoad,
    TokenEngine,
    TokenStep,
)
from freewheel.engine.tokenizer import Tokenizer
from freewheel.runtime import (
    DeviceTrace,
    GpuPlan,
    KernelTime,
    Machine,
    PeerTime,
    Resolved,
    Span,
    SteadyCounts,
    SteadyDecode,
    SteadyRun,
    Survey,
    bench_kernels,
    choose_cells,
    convert,
    covered,
    follow_local,
    join,
    kill_ranks,
    outline,
    plan_gpus,
    survey,
    verify,
)

__all__ = [
    "LLM",
    "ONE_TOKEN",
    "Arrival",
    "CanaryLoad",
    "Chunk",
    "DeviceTrace",
    "DiskLoad",
    "GpuPlan",
    "HandoffLoad",
    "KernelTime",
    "Load",
    "Logprobs",
    "Machine",
    "Metrics",
    "Output",
    "PeerTime",
    "Piece",
    "PoolLoad",
    "Prompt",
    "Reader",
    "Reading",
    "Resolved",
    "RoundTimes",
    "Selection",
    "Span",
    "SteadyCounts",
    "SteadyDecode",
    "SteadyRun",
    "Survey",
    "TierLoad",
    "TokenEngine",
    "TokenStep",
    "Tokenizer",
    "bench_kernels",
    "choose_cells",
    "convert",
    "covered",
    "follow_local",
    "join",
    "kill_ranks",
    "outline",
    "plan_gpus",
    "survey",
    "verify",
]
