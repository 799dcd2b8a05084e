# SPDX-License-Identifier: Apache-2.0
"""A catalogue of capture footguns: what each does under a tape, as it would in a CUDA graph.

Ranked by how it hurts: first what is silently frozen (inherent to capture; know it), then what is
silently not seen, then what would be silent on a GPU and is caught here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.errors import CaptureError, HostSync
from freewheel.graph import EagerGraph, TapeGraph, count_host_reads, trace_on_meta


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def tape(*static: Tensor) -> TapeGraph[Any]:
    return TapeGraph(static, poison=True)


# ---- silently frozen


def test_a_python_number_is_frozen() -> None:
    x, host = torch.ones(1), Namespace(scale=2)
    graph = tape(x)
    out = graph.capture(lambda: x * host.scale)
    host.scale = 5
    graph.replay()
    assert out == 2


def test_an_in_place_python_counter_advances_once() -> None:
    x, host = torch.ones(1), Namespace(step=0)
    graph = tape(x)

    def step() -> Tensor:
        host.step += 1
        return x + host.step

    out = graph.capture(step)
    graph.replay()
    graph.replay()
    assert (host.step, out.item()) == (1, 2)


def test_a_branch_on_a_python_value_is_frozen() -> None:
    x, host = torch.ones(1), Namespace(double=True)
    graph = tape(x)
    out = graph.capture(lambda: x * 2 if host.double else x)
    host.double = False
    graph.replay()
    assert out == 2


def test_a_loop_is_unrolled_for_good() -> None:
    x, host = torch.ones(1), Namespace(depth=3)
    graph = tape(x)

    def step() -> Tensor:
        y = x
        for _ in range(host.depth):
            y = y + 1
        return y

    out = graph.capture(step)
    host.depth = 100
    graph.replay()
    assert out == 4


def test_a_shape_is_frozen() -> None:
    x = torch.ones(2, 3)
    graph = tape(x)
    out = graph.capture(lambda: x.sum() / len(x))
    x.unsqueeze_(0)
    graph.replay()
    assert out == 3


def test_a_list_append_happens_once() -> None:
    x, seen = torch.ones(1), list[Tensor]()
    graph = tape(x)
    graph.capture(lambda: seen.append(x + 1))
    for _ in range(3):
        graph.replay()
    assert len(seen) == 1


def test_a_list_argument_is_frozen() -> None:
    x, shape = torch.arange(6.0), [2, 3]
    graph = tape(x)
    out = graph.capture(lambda: (x + 1).view(shape))
    shape[:] = [3, 2]
    graph.replay()
    assert out.shape == (2, 3)


def test_a_print_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(1)
    graph = tape(x)
    graph.capture(lambda: print("round"))
    graph.replay()
    assert capsys.readouterr().out == "round\n"


def test_a_seed_inside_is_set_once_and_for_the_capture_only() -> None:
    """`manual_seed` is host code: every replay continues the stream, and no two are alike."""
    own = torch.Generator()
    graph = tape()

    def draw() -> Tensor:
        own.manual_seed(5)
        return torch.rand(3, generator=own)

    out = graph.capture(draw)
    first = graph.replay().clone()
    assert not torch.equal(first, graph.replay())
    assert out.shape == (3,)


# ---- silently not seen


def test_reassigning_a_static_attribute_is_not_seen() -> None:
    model = Namespace(weight=torch.ones(1))
    x = torch.ones(1)
    graph = tape(x, model.weight)
    out = graph.capture(lambda: x * model.weight)
    model.weight = torch.full((1,), 9.0)
    graph.replay()
    assert out == 1


def test_writing_a_static_attribute_in_place_is_seen() -> None:
    model = Namespace(weight=torch.ones(1))
    x = torch.ones(1)
    graph = tape(x, model.weight)
    out = graph.capture(lambda: x * model.weight)
    model.weight.fill_(9)
    graph.replay()
    assert out == 9


def test_a_kept_output_is_overwritten_by_the_next_replay() -> None:
    x = torch.ones(1)
    graph = tape(x)
    graph.capture(lambda: x + 1)
    kept, copied = graph.replay(), graph.replay().clone()
    x.fill_(7)
    graph.replay()
    assert (kept.item(), copied.item()) == (8, 2)


def test_a_number_in_the_output_is_the_captures() -> None:
    x, host = torch.ones(1), Namespace(width=4)
    graph = tape(x)
    _, width = graph.capture(lambda: (x + 1, host.width))
    host.width = 8
    assert graph.replay()[1] == width == 4


def test_an_eager_graph_freezes_none_of_this() -> None:
    """Which is why an eager run proves little about a captured one."""
    x, host = torch.ones(1), Namespace(scale=2)
    graph: EagerGraph[Tensor] = EagerGraph()
    out = graph.capture(lambda: x * host.scale)
    host.scale = 5
    graph.replay()
    assert out == 5


# ---- silent on a GPU, caught here


def test_a_leaked_temporary_is_poison() -> None:
    x, host = torch.ones(1), Namespace(hidden=None)
    graph = tape(x)

    def step() -> Tensor:
        host.hidden = x * 2
        return host.hidden + 1

    graph.capture(step)
    graph.replay()
    assert host.hidden.isnan().all()


def test_a_captures_output_read_before_a_replay_is_poison() -> None:
    x = torch.ones(1)
    assert tape(x).capture(lambda: x + 1).isnan()


def test_a_buffer_that_only_the_closure_knows_is_an_error() -> None:
    x, forgotten = torch.ones(1), torch.ones(1)
    with pytest.raises(CaptureError, match="neither static nor made in this graph"):
        tape(x).capture(lambda: forgotten.add_(x))


def test_a_tensor_cached_by_an_earlier_capture_is_an_error() -> None:
    """A mask made lazily inside the first capture belongs to the first graph alone."""
    x, host = torch.ones(3), Namespace(mask=None)

    def step() -> Tensor:
        if host.mask is None:
            host.mask = torch.arange(3) > 0
        return x.masked_fill(host.mask, 0)

    first, second = tape(x), tape(x)
    first.capture(step)
    with pytest.raises(CaptureError, match="masked_fill"):
        second.capture(step)


def test_another_graphs_output_must_be_registered() -> None:
    x = torch.ones(1)
    first = tape(x)
    hidden = first.capture(lambda: x + 1)
    with pytest.raises(CaptureError):
        tape(x).capture(lambda: hidden * 2)
    second = tape(x, hidden)
    out = second.capture(lambda: hidden * 2)
    first.replay()
    second.replay()
    assert out == 4


def test_a_replay_inside_a_capture_is_an_error_of_the_caller() -> None:
    x = torch.ones(1)
    inner, outer = tape(x), tape(x)
    inner.capture(lambda: x + 1)
    with pytest.raises(CaptureError, match=r"aten::copy_ uses .* at .*test_footguns\.py:\d+"):
        outer.capture(inner.replay)


def test_a_python_list_made_a_tensor_is_an_error() -> None:
    x = torch.ones(2)
    with pytest.raises(HostSync, match=r"torch\.tensor copies"):
        tape(x).capture(lambda: x + torch.tensor([1.0, 2.0]))


def test_a_number_from_the_device_is_an_error_even_if_unused() -> None:
    x = torch.ones(1)
    with pytest.raises(HostSync, match=r"Tensor\.item"):
        tape(x).capture(lambda: (x.item(), x + 1)[1])


def test_memory_that_nobody_wrote_is_poison() -> None:
    x = torch.ones(1)
    graph = tape(x)
    out = graph.capture(lambda: torch.empty(1) * x)
    graph.replay()
    assert out.isnan()


def test_growing_a_static_buffer_is_an_error() -> None:
    x, room = torch.ones(3), torch.empty(0)
    with pytest.raises(CaptureError, match=r"aten::add.out moved a static tensor"):
        tape(x, room).capture(lambda: torch.add(x, 1, out=room))


def test_another_output_structure_is_an_error_in_an_eager_graph() -> None:
    x, host = torch.ones(2), Namespace(logprobs=True)
    graph: EagerGraph[Any] = EagerGraph()
    graph.capture(lambda: (x + 1, x + 2 if host.logprobs else None))
    host.logprobs = False
    with pytest.raises(CaptureError, match=r"output\[1\]"):
        graph.replay()


# ---- looks like a footgun, and is none


def test_a_tensor_branch_free_select_is_live() -> None:
    x = torch.ones(1)
    graph = tape(x)
    out = graph.capture(lambda: torch.where(x > 2, x, -x))
    x.fill_(5)
    graph.replay()
    assert out == 5


def test_a_python_number_written_into_a_tensor_reads_nothing() -> None:
    x = torch.ones(3)
    graph = tape(x)
    with count_host_reads() as log:
        graph.capture(lambda: x.__setitem__(1, 4.0))
        graph.replay()
    assert x.tolist() == [1, 4, 1]
    assert not log.reads
    trace_on_meta(lambda: torch.empty(3, device="meta").__setitem__(1, 4.0))


def test_a_reshaped_static_tensor_keeps_its_address() -> None:
    x = torch.ones(4)
    graph = tape(x)
    out = graph.capture(lambda: x.sum() + 0)
    x.unsqueeze_(0)
    x.fill_(2)
    graph.replay()
    assert out == 8
