# SPDX-License-Identifier: Apache-2.0
"""Capture and replay: a function on device tensors becomes a graph, and the host stays out of it.

- `guard`: `no_host_sync` makes every host read an error that names its file and line.
- `audit`: `CaptureAudit` makes every tensor that a capture neither registered nor made an error.
- `base`: the `Graph` protocol and `EagerGraph`, which calls the function again.
- `tape`: `TapeGraph`, CUDA-graph semantics on a CPU. `recorder` writes the calls down, `program`
  compiles them, `rewind` undoes the capture's effects, `poison` marks memory nobody may read.
- `cuda`: `CudaGraph`, a captured CUDA graph.
- `meta`: `trace_on_meta` runs a function at production dimensions without memory.

This package may import PyTorch, `freewheel.errors` and the standard library. It must never know a
model, a cache, a request or an operator of this project by name: it works on anyone's PyTorch code.
It must never read a device value itself, nor pass over something that a GPU would refuse.
"""

from __future__ import annotations

from freewheel.graph.audit import CaptureAudit
from freewheel.graph.base import EagerGraph, Graph
from freewheel.graph.cuda import CudaGraph, GraphPool, cuda_waits_are_errors
from freewheel.graph.guard import DeviceCopy, HostRead, SyncLog, count_host_reads, no_host_sync
from freewheel.graph.meta import calls_on_meta, trace_on_meta
from freewheel.graph.poison import POISON_INT, poison_
from freewheel.graph.tape import TapeGraph

__all__ = [
    "POISON_INT",
    "CaptureAudit",
    "CudaGraph",
    "DeviceCopy",
    "EagerGraph",
    "Graph",
    "GraphPool",
    "HostRead",
    "SyncLog",
    "TapeGraph",
    "calls_on_meta",
    "count_host_reads",
    "cuda_waits_are_errors",
    "no_host_sync",
    "poison_",
    "trace_on_meta",
]
