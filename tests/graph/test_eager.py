# SPDX-License-Identifier: Apache-2.0
"""`EagerGraph` keeps the promises of `Graph`, so that it can stand in for a captured one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.errors import CaptureError, HostSync
from freewheel.graph import EagerGraph, Graph, TapeGraph


@pytest.fixture(autouse=True)
def _both_grad_modes(grad_mode: Callable[[], Any]):
    with grad_mode():
        yield


def test_capture_changes_no_tensor_and_no_random_state() -> None:
    x, cache = torch.ones(3), torch.zeros(4, 3)
    own = torch.Generator().manual_seed(1)
    before = torch.get_rng_state(), own.get_state()

    def step() -> Tensor:
        cache[1:3].add_(x.mul_(2))
        return cache.sum() + torch.rand(1) + torch.rand(1, generator=own)

    EagerGraph[Tensor]().capture(step)
    assert x.tolist() == [1, 1, 1]
    assert not cache.any()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(own.get_state(), before[1])


def test_capture_puts_everything_back_after_an_error() -> None:
    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError):
        EagerGraph[object]().capture(lambda: (x.mul_(2), 1 // 0))
    assert x.tolist() == [1, 1, 1]


def test_outputs_keep_object_and_address_across_replays() -> None:
    x = torch.ones(3)
    graph: EagerGraph[Any] = EagerGraph()
    out = graph.capture(lambda: [x + 1, None, (x * 2).expand(2, 3), x[1:]])
    addresses = [t.data_ptr() for t in out if t is not None]
    for _ in range(2):
        x.add_(1)
        assert graph.replay() is out
        assert torch.equal(out[0], x + 1)
        assert torch.equal(out[2], (x * 2).expand(2, 3))
        assert torch.equal(out[3], x[1:])
    assert [t.data_ptr() for t in out if t is not None] == addresses


def test_a_guarded_graph_refuses_a_host_read_at_capture_and_at_replay() -> None:
    x, host = torch.ones(1), Namespace(peek=True)
    graph: EagerGraph[Tensor] = EagerGraph(guard=True)

    def step() -> Tensor:
        return x + x.item() if host.peek else x + 1

    with pytest.raises(HostSync, match=r"test_eager\.py"):
        graph.capture(step)
    host.peek = False
    graph.capture(step)
    host.peek = True
    with pytest.raises(HostSync, match=r"test_eager\.py"):
        graph.replay()
    unguarded: EagerGraph[Tensor] = EagerGraph()
    unguarded.capture(step)
    assert unguarded.replay() == 2


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (lambda x: [x + 1], lambda x: [x + 1, x + 2], r"different tensors: output\[1\]"),
        (lambda x: x + 1, lambda x: x[1:] + 1, r"output was .* \[3\] at capture"),
        (lambda x: x + 1, lambda x: x.double() + 1, r"torch.float64 \[3\] at replay"),
        (lambda x: x[:2], lambda x: x[1:], r"output was another static tensor"),
    ],
    ids=["structure", "shape", "dtype", "address"],
)
def test_an_output_that_changes_its_form_is_refused(
    first: Callable[[Tensor], Any], then: Callable[[Tensor], Any], message: str
) -> None:
    x, host = torch.ones(3), Namespace(form=first)
    graph: EagerGraph[Any] = EagerGraph()
    graph.capture(lambda: host.form(x))
    host.form = then
    with pytest.raises(CaptureError, match=message):
        graph.replay()
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("make", [EagerGraph, lambda: TapeGraph(())], ids=["eager", "tape"])
def test_order_of_calls_is_checked(make: Callable[[], Graph[None]]) -> None:
    graph = make()
    with pytest.raises(CaptureError, match="nothing to replay"):
        graph.replay()
    graph.capture(lambda: None)
    with pytest.raises(CaptureError, match="captured already"):
        graph.capture(lambda: None)


@pytest.mark.parametrize("kind", ["eager", "tape"])
def test_a_harmless_function_is_run_and_not_undone(kind: str) -> None:
    """What an engine does on its scratch row; its caches are too large to copy."""
    scratch = torch.zeros(2)
    graph: Graph[Any] = EagerGraph(harmless=True)
    if kind == "tape":
        graph = TapeGraph(scratch, harmless=True, poison=True)
    out = graph.capture(lambda: (scratch.add_(1), scratch + 1, scratch[1:]))
    assert scratch.tolist() == [1, 1]
    graph.replay()
    assert [t.tolist() for t in out] == [[2, 2], [3, 3], [2]]


def test_an_output_of_another_kind_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"output is a set"):
        EagerGraph[Any]().capture(lambda: {torch.ones(1)})
