# SPDX-License-Identifier: Apache-2.0
"""Time single ops on a CUDA device, and peers' kernels beside them.

Each contender is one captured graph of calls over several sets of inputs. Graphs are replayed in
turn, ours, a peer's, ours, a peer's, so that a clock that drifts does so for all; a time is the
median of the replays, over the calls of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from freewheel.errors import ConfigError
from freewheel.ops import load_kernels
from freewheel.runtime.deterministic import in_fixed_blocks
from freewheel.runtime.kernel_cells import CELLS, QUICK, Cell
from freewheel.runtime.kernel_inputs import draw_sets
from freewheel.runtime.kernel_peers import PEERS, Call

REPLAYS, WARM = 20, 3

FIXED = "deterministic"

FAULTS = (
    AssertionError, AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What a peer that is not there, or not made for this device, ends with."""


@dataclass(frozen=True)
class PeerTime:
    """`us` None: it was not timed, and `reason` says why."""

    name: str
    us: float | None
    reason: str = ""


@dataclass(frozen=True)
class KernelTime:
    """One cell. `error` as `Inputs.error` has it; `floor_us` as `Cell.floor_us`.

    `fixed_us`: in the deterministic mode.
    """

    op: str
    cell: str
    us: float
    fixed_us: float
    floor_us: float
    error: float
    peers: tuple[PeerTime, ...]

    @property
    def best_peer(self) -> PeerTime | None:
        timed = [peer for peer in self.peers if peer.us is not None]
        return min(timed, key=lambda peer: peer.us or 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """Our time over the best peer's."""
        best = self.best_peer
        return None if best is None or best.us is None else self.us / best.us


def choose_cells(names: tuple[str, ...], quick: bool) -> tuple[Cell, ...]:
    """The cells of these ops, of all if none is named. Raises ConfigError for an unknown op."""
    known = {cell.op for cell in CELLS}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ConfigError(f"ops: {unknown[0]!r} is not measured; choose from {sorted(known)}")
    return tuple(cell for cell in (QUICK if quick else CELLS) if not names or cell.op in names)


def bench_kernels(cells: Iterable[Cell], peers: Path | None) -> Iterator[KernelTime]:
    """Measure each cell. `peers`: a folder as `kernel_peers` describes it.

    Raises ConfigError if there is no CUDA device or no such folder.
    """
    if not torch.cuda.is_available():
        raise ConfigError("device: bench kernels needs a CUDA device, and PyTorch sees none")
    if peers is not None and not peers.is_dir():
        raise ConfigError(f"peers: there is no folder {peers}")
    load_kernels("cuda")
    broken: dict[str, str] = {}
    with torch.no_grad():
        for cell in cells:
            yield _measure(cell, peers, broken)
            torch.cuda.empty_cache()


def _measure(cell: Cell, root: Path | None, broken: dict[str, str]) -> KernelTime:
    sets = draw_sets(cell, torch.device("cuda"))
    graphs = {
        "": _captured([one.call for one in sets]),
        FIXED: _captured([in_fixed_blocks(one.call) for one in sets]),
    }
    reasons: dict[str, str] = {}
    for peer in PEERS:
        if peer.op != cell.op:
            continue
        if root is None:
            reasons[peer.name] = "absent: no folder was given"
        elif not peer.serves(cell):
            reasons[peer.name] = "does not serve this size"
        elif peer.name in broken:
            reasons[peer.name] = broken[peer.name]
        else:
            try:
                graphs[peer.name] = _captured([peer.prepare(root, one) for one in sets])
            except FAULTS as error:
                first = (str(error).strip() or "no message").splitlines()[0]
                broken[peer.name] = reasons[peer.name] = f"{type(error).__name__}: {first}"
    times = _in_turn({name: graph.replay for name, graph in graphs.items()})
    calls = len(sets)
    return KernelTime(
        op=cell.op,
        cell=cell.name,
        us=times.pop("") / calls,
        fixed_us=times.pop(FIXED) / calls,
        floor_us=cell.floor_us,
        error=sets[0].error(sets[0].call()),
        peers=(
            *(PeerTime(name, us / calls) for name, us in times.items()),
            *(PeerTime(name, None, reason) for name, reason in reasons.items()),
        ),
    )


def _captured(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """A graph of all calls, each of which has run twice before, on the stream of the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def _in_turn(replays: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Microseconds of one replay of each: the median, all replayed in turn."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for nth in range(WARM + REPLAYS):
        for name, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            if nth >= WARM:
                times[name].append(1000 * begin.elapsed_time(end))
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}
