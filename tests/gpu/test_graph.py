# SPDX-License-Identifier: Apache-2.0
"""`CudaGraph` keeps the promises of `Graph`, and its watchers watch."""

from __future__ import annotations

import gc

import pytest
import torch

from freewheel.errors import CaptureError, HostSync
from freewheel.graph import CudaGraph, GraphPool, cuda_waits_are_errors


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


def test_capture_changes_nothing_and_replay_does() -> None:
    x, total = ones(4), ones(4)
    graph: CudaGraph[torch.Tensor] = CudaGraph((x, total))
    out = graph.capture(lambda: total.add_(x) * 2)
    assert torch.equal(total, ones(4))
    assert graph.replay() is out
    assert torch.equal(total, ones(4) * 2) and torch.equal(out, ones(4) * 4)
    x.fill_(5)
    graph.replay()
    assert torch.equal(out, ones(4) * 14)


def test_a_stray_tensor_a_read_and_a_wait_are_errors_at_capture() -> None:
    x, stray = ones(4), ones(4)
    with pytest.raises(CaptureError, match="neither static nor made"):
        CudaGraph((x,)).capture(lambda: x + stray)
    with pytest.raises(HostSync):
        CudaGraph((x,)).capture(lambda: x.sum().item())
    with pytest.raises(RuntimeError):
        CudaGraph((x,)).capture(torch.cuda.synchronize)
    torch.cuda.synchronize()
    assert torch.equal(x + 1, ones(4) * 2)


def test_graphs_of_one_pool_replay_in_turn() -> None:
    x, pool = ones(1000), GraphPool()
    graphs: list[CudaGraph[torch.Tensor]] = [CudaGraph((x,), pool=pool) for _ in range(3)]
    outs = [g.capture(lambda n=n: (x[: 1000 >> n] * 3).cumsum(0)) for n, g in enumerate(graphs)]
    for turn in range(3):
        x.fill_(turn)
        for n, graph in enumerate(graphs):
            graph.replay()
            assert float(outs[n][-1]) == 3 * turn * (1000 >> n)


def test_a_graph_left_in_a_cycle_is_not_freed_while_another_is_captured() -> None:
    x, before = ones(4), gc.get_threshold()
    graph: CudaGraph[torch.Tensor] = CudaGraph((x,))
    graph.capture(lambda: x + 1)
    cycle: list[object] = [graph]
    cycle.append(cycle)
    gc.set_threshold(1)
    try:
        del graph, cycle
        other: CudaGraph[list[torch.Tensor]] = CudaGraph((x,))
        outs = other.capture(lambda: [x + n for n in range(50)])
    finally:
        gc.set_threshold(*before)
    other.replay()
    assert torch.equal(outs[-1], ones(4) * 50)


def test_waits_are_errors_inside_and_allowed_behind() -> None:
    x = ones(2)
    with cuda_waits_are_errors(), pytest.raises(RuntimeError):
        x.sum().item()
    assert x.sum().item() == 2
