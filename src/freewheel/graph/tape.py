# SPDX-License-Identifier: Apache-2.0
"""`TapeGraph`: CUDA-graph semantics without a GPU.

Capture runs a function once and records its operator calls. Replay performs these calls and no line
of the function, so that host numbers, control flow and the addresses of static tensors are frozen
as in a CUDA graph, and a test on a CPU exercises the program that a GPU would replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import torch

from freewheel.errors import CaptureError
from freewheel.graph.audit import CaptureAudit
from freewheel.graph.guard import no_host_sync
from freewheel.graph.poison import poison_
from freewheel.graph.program import Program
from freewheel.graph.recorder import Recorder
from freewheel.graph.rewind import Rewind
from freewheel.graph.tree import leaves

__all__ = ["TapeGraph"]

T = TypeVar("T")


class TapeGraph(Generic[T]):
    """A `Graph` that replays recorded operator calls.

    `static` is a tree of all tensors that the function may read or write besides those that it
    makes. With `poison`, whatever else the capture left in memory turns into NaN or 2**30, its
    outputs too until the first replay, and so does each `torch.empty`: whoever reads a stale
    temporary or uninitialised memory is caught. `harmless`: running the function once has no effect
    that matters, so that capture need not undo it; undoing copies every storage that it writes.

    As in a CUDA graph, capture leaves static tensors and the random state untouched, replays draw
    fresh random numbers, and a replay overwrites the last one's outputs. Unlike in one, a temporary
    that leaked out of the function never holds a replay's value; return it instead.
    """

    def __init__(self, static: object, *, poison: bool = False, harmless: bool = False) -> None:
        self._static = [tensor for _, tensor in leaves(static, "static")]
        self._poison, self._harmless = poison, harmless
        self._counts: Counter[str] = Counter()
        self._program: Program | None = None
        self._output: T | None = None
        self._default_dtype = torch.get_default_dtype()

    def capture(self, fn: Callable[[], T]) -> T:
        """Record `fn`; returns its output, whose tensors every replay refreshes in place.

        Raises:
            HostSync: `fn` reads a device value on the host.
            CaptureError: `fn` uses a stray tensor, moves a static one, or returns something other
                than a tree of tensors; or this graph is captured already.
        """
        if self._program is not None:
            raise CaptureError("this graph is captured already; make another one")
        audit = CaptureAudit(self._static)
        recorder, rewind = Recorder(audit, self._poison), Rewind(harmless=self._harmless)
        self._default_dtype = torch.get_default_dtype()
        with torch.no_grad(), rewind, no_host_sync(), recorder, audit:
            output = fn()
        program = Program([*recorder.calls, *recorder.output_calls(output)])
        if self._poison:
            for leftover in audit.made.alive():
                poison_(leftover)
        self._program, self._output, self._counts = program, output, audit.counts
        return output

    def replay(self) -> T:
        """Perform the recorded calls; returns the very object that `capture` returned.

        Raises:
            CaptureError: nothing is captured, or the default dtype changed since.
        """
        if self._program is None:
            raise CaptureError("nothing to replay: call capture(fn) first")
        if torch.get_default_dtype() is not self._default_dtype:
            raise CaptureError(f"captured under the default dtype {self._default_dtype}; set it")
        with torch.inference_mode():
            self._program.run()
        return cast(T, self._output)

    @property
    def counts(self) -> Counter[str]:
        """How often the captured function called each operator, views included, by name."""
        return self._counts

    @property
    def listing(self) -> str:
        """The replayed calls, one a line: `t*` are temporaries, everything else is frozen."""
        return "" if self._program is None else self._program.listing

    def __len__(self) -> int:
        """How many calls a replay makes."""
        return 0 if self._program is None else len(self._program)
