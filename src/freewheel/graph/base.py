# SPDX-License-Identifier: Apache-2.0
"""What a graph promises, whatever replays it, and the graph that runs Python each time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from freewheel.errors import CaptureError
from freewheel.graph.guard import no_host_sync
from freewheel.graph.rewind import Rewind
from freewheel.graph.tree import leaves, repeated_dims

__all__ = ["EagerGraph", "Graph"]

T = TypeVar("T")


class Graph(Protocol[T]):
    """A function on device tensors, made replayable.

    - `capture` has no effect on tensors that exist already, unless the graph was told that the
      function is `harmless`: then it may run for good.
    - `capture` returns the function's output; what it holds is undefined until the first replay.
    - `replay` returns that same object, its tensors refreshed in place: their addresses are stable,
      and a reader of one round's output must copy it before the next replay.
    - The output is a tree: tensors, None, plain values, and lists, tuples, dicts and dataclasses of
      these. Only its tensors are refreshed; a number in it is the one that capture saw.
    - No gradients.
    """

    def capture(self, fn: Callable[[], T]) -> T: ...

    def replay(self) -> T: ...


class EagerGraph(Generic[T]):
    """Calls the function at each replay: no frozen numbers, no static registry, easy to debug.

    With `guard`, each call runs under `no_host_sync`. `harmless`: running the function once has no
    effect that matters, so that capture need not undo it; undoing copies every storage that it
    writes.
    """

    def __init__(self, *, guard: bool = False, harmless: bool = False) -> None:
        self._guard, self._harmless = guard, harmless
        self._captured: tuple[Callable[[], T], T] | None = None
        self._older: set[str] = set()  # outputs that existed before capture: static ones

    def capture(self, fn: Callable[[], T]) -> T:
        """Run `fn` once for the shape of its output and undo what it wrote.

        Raises:
            HostSync: `guard` is set and `fn` reads a device value on the host.
            CaptureError: the output is no tree of tensors, or this graph is captured already.
        """
        if self._captured is not None:
            raise CaptureError("this graph is captured already; make another one")
        with torch.no_grad(), Rewind(harmless=self._harmless) as rewind, self._watch():
            output = fn()
        self._older = {path for path, t in leaves(output, "output") if t not in rewind.made}
        self._captured = (fn, output)
        return output

    def replay(self) -> T:
        """Call the function; returns the very object that `capture` returned.

        Raises:
            HostSync: as `capture`.
            CaptureError: nothing is captured, or the output changed its structure, a shape, or
                which static tensor it is.
        """
        if self._captured is None:
            raise CaptureError("nothing to replay: call capture(fn) first")
        fn, output = self._captured
        with torch.no_grad(), self._watch():
            fresh = fn()
        targets, sources = dict(leaves(output, "output")), dict(leaves(fresh, "output"))
        if targets.keys() != sources.keys():
            changed = ", ".join(sorted(targets.keys() ^ sources.keys()))
            raise CaptureError(f"capture and replay return different tensors: {changed}")
        with torch.inference_mode():
            for path, target in targets.items():
                self._refresh(path, target, sources[path])
        return output

    def _refresh(self, path: str, target: Tensor, source: Tensor) -> None:
        if (target.shape, target.dtype) != (source.shape, source.dtype):
            raise CaptureError(
                f"{path} was {target.dtype} {list(target.shape)} at capture and is {source.dtype} "
                f"{list(source.shape)} at replay; shapes are static"
            )
        if path in self._older:
            if target.data_ptr() != source.data_ptr():
                raise CaptureError(f"{path} was another static tensor at capture")
            return
        for dim in repeated_dims(target):
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        target.copy_(source)

    def _watch(self) -> AbstractContextManager[object]:
        return no_host_sync() if self._guard else nullcontext()
