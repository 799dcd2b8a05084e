# SPDX-License-Identifier: Apache-2.0
"""`CudaGraph`: the real thing. A capture records kernels; a replay is one launch.

Capture runs the function twice: once eagerly on a side stream, so that every kernel is compiled,
every library has its handle and its workspace, and then recorded. While it is recorded three
watchers are on: `CaptureAudit` (no stray tensor), `no_host_sync` (no read that PyTorch's operators
show) and `torch.cuda.set_sync_debug_mode("error")` (no wait that CUDA shows). The last is armed
after the capture began and disarmed before it ends, since both of these wait themselves.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar, cast

import torch

from freewheel.errors import CaptureError
from freewheel.graph.audit import CaptureAudit
from freewheel.graph.guard import no_host_sync
from freewheel.graph.rewind import Rewind
from freewheel.graph.tree import leaves

__all__ = ["CudaGraph", "GraphPool", "cuda_waits_are_errors"]

T = TypeVar("T")

_cuda = cast(Any, torch.cuda)  # half of its members lack types


@contextmanager
def cuda_waits_are_errors() -> Generator[None]:
    """A context in which a CUDA call that makes the host wait raises RuntimeError.

    Waiting for an event of one's own is not such a call. The setting belongs to the process.
    """
    before = _cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "a prototype feature", once a process
        _cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        _cuda.set_sync_debug_mode(before)


@contextmanager
def _nothing_is_collected() -> Generator[None]:
    """A context in which Python's collector does not run.

    It could free another graph, left in a cycle of references, and freeing a graph is among the
    calls that CUDA forbids while a stream records: the recording would be lost.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class GraphPool:
    """What the graphs of one program share: memory for temporaries, and the stream they record on.

    Graphs of one pool use the same memory, so they must never run at the same time: replay them on
    one stream. Capture the largest first, so that the smaller ones fit what is there.
    """

    def __init__(self) -> None:
        self.handle: Any = _cuda.graph_pool_handle()
        self.stream: Any = _cuda.Stream()

    @contextmanager
    def warming(self) -> Generator[None]:
        """A context whose work is on this stream, before a capture and behind what is queued."""
        current = _cuda.current_stream()
        self.stream.wait_stream(current)
        with _cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)


class CudaGraph(Generic[T]):
    """A `Graph` on the current CUDA device.

    `static` is a tree of all tensors that the function may read or write besides those that it
    makes. `harmless`: running the function has no effect that matters, so that the warm-up need not
    be undone; undoing it copies every storage that the function writes, caches too.
    """

    def __init__(
        self, static: object, *, pool: GraphPool | None = None, harmless: bool = False
    ) -> None:
        self._static = [tensor for _, tensor in leaves(static, "static")]
        self._pool = pool or GraphPool()
        self._harmless = harmless
        self._counts: Counter[str] = Counter()
        self._graph: Any = None
        self._output: T | None = None

    def capture(self, fn: Callable[[], T]) -> T:
        """Warm up, then record `fn`; returns its output, whose tensors every replay refreshes.

        Raises:
            HostSync: `fn` reads a device value on the host.
            CaptureError: `fn` uses a stray tensor, moves a static one, or returns something other
                than a tree of tensors; or this graph is captured already.
        """
        if self._graph is not None:
            raise CaptureError("this graph is captured already; make another one")
        stream, current = self._pool.stream, _cuda.current_stream()
        stream.wait_stream(current)
        audit = CaptureAudit(self._static)
        with torch.no_grad(), _cuda.stream(stream):
            with self._undone():
                fn()
            stream.synchronize()
            graph = _cuda.CUDAGraph()
            with _nothing_is_collected():
                graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
                try:
                    with cuda_waits_are_errors(), no_host_sync(device="cuda"), audit:
                        output = fn()
                finally:
                    graph.capture_end()
        current.wait_stream(stream)
        for _ in leaves(output, "output"):
            pass  # raises where the output is no tree
        self._graph, self._output, self._counts = graph, output, audit.counts
        return output

    def replay(self) -> T:
        """Launch the graph on the current stream; returns the very object that `capture` returned.

        Raises:
            CaptureError: nothing is captured.
        """
        if self._graph is None:
            raise CaptureError("nothing to replay: call capture(fn) first")
        self._graph.replay()
        return cast(T, self._output)

    @property
    def counts(self) -> Counter[str]:
        """How often the captured function called each operator, views included, by name."""
        return self._counts

    def _undone(self) -> AbstractContextManager[object]:
        return nullcontext() if self._harmless else Rewind()
