# SPDX-License-Identifier: Apache-2.0
"""`TapeGraph`: what is frozen, what is live and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.errors import CaptureError, HostSync
from freewheel.graph import CaptureAudit, TapeGraph, no_host_sync
from freewheel.graph.recorder import Recorder
from freewheel.graph.rewind import Rewind

GradMode = Callable[[], Any]


@pytest.fixture(autouse=True)
def _both_grad_modes(grad_mode: GradMode):
    with grad_mode():
        yield


def tape(*static: Tensor) -> TapeGraph[Any]:
    return TapeGraph(static, poison=True)


# ---- what a replay does


def test_replay_reads_static_tensors_anew() -> None:
    x = torch.tensor([1.0, 2.0])
    graph = tape(x)
    out = graph.capture(lambda: x * 2 + 1)
    for value in (3.0, 5.0):
        x.fill_(value)
        assert graph.replay().tolist() == [2 * value + 1] * 2
        assert out.tolist() == [2 * value + 1] * 2


def test_outputs_keep_object_and_address_across_replays() -> None:
    x = torch.arange(4.0)
    graph = tape(x)
    out = graph.capture(lambda: {"sum": x.sum(), "parts": x.split(2)})
    address = out["sum"].data_ptr()
    for _ in range(3):
        x.add_(1)
        assert graph.replay() is out
        assert out["sum"].data_ptr() == address
        assert out["sum"] == x.sum()
        assert [p.tolist() for p in out["parts"]] == [x[:2].tolist(), x[2:].tolist()]


def test_replay_writes_static_tensors_in_place() -> None:
    x, total = torch.ones(3), torch.zeros(3)
    graph = tape(x, total)

    def step() -> Tensor:
        total[1:].add_(x[1:])
        torch.mul(x, 2, out=x)
        return total.sum()

    out = graph.capture(step)
    for expected in ([0.0, 1, 1], [0.0, 3, 3], [0.0, 7, 7]):
        graph.replay()
        assert total.tolist() == expected
        assert out == sum(expected)


def test_capture_changes_no_static_tensor() -> None:
    x, cache = torch.ones(3), torch.zeros(5, 3)
    graph = tape(x, cache)

    def step() -> Tensor:
        x.mul_(3)
        cache[2] = x
        cache.view(-1)[0] = 7
        return x + 1

    graph.capture(step)
    assert x.tolist() == [1, 1, 1]
    assert not cache.any()
    graph.replay()
    assert x.tolist() == [3, 3, 3]
    assert cache[2].tolist() == [3, 3, 3]
    assert cache[0, 0] == 7


def test_a_failed_capture_changes_nothing_and_can_be_repeated() -> None:
    x = torch.ones(3)
    graph = tape(x)
    with pytest.raises(HostSync):
        graph.capture(lambda: x.mul_(3).sum().item())
    assert x.tolist() == [1, 1, 1]
    graph.capture(lambda: x.mul_(3).sum())
    assert graph.replay() == 9
    assert graph.counts == {"aten::mul_.Tensor": 1, "aten::sum": 1}


def test_random_operators_draw_fresh_numbers_as_eager_would() -> None:
    x = torch.zeros(4)
    own = torch.Generator().manual_seed(3)
    graph = tape(x)

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        return torch.rand(4), x.clone().exponential_(), torch.rand(2, generator=own)

    torch.manual_seed(11)
    out = graph.capture(draw)
    replayed = [[t.clone() for t in graph.replay()] for _ in range(2)]
    torch.manual_seed(11)
    own.manual_seed(3)
    eager = [draw() for _ in range(2)]
    assert not torch.equal(replayed[0][0], replayed[1][0])
    for got, want in zip(replayed, eager, strict=True):
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)
    assert len(out) == 3


def test_constants_made_inside_are_remade() -> None:
    x = torch.zeros(4)
    graph = tape(x)

    def step() -> Tensor:
        ramp = torch.arange(4.0)
        ramp += torch.full((4,), 10.0)
        ramp[0] = 5.0
        return x + ramp + torch.ones(()) + torch.zeros_like(x)

    out = graph.capture(step)
    for _ in range(2):
        graph.replay()
        assert out.tolist() == [6, 12, 13, 14]


def test_a_view_of_a_static_tensor_costs_no_call() -> None:
    x = torch.zeros(4, 4)
    graph = tape(x)
    out = graph.capture(lambda: torch.sum(x.t()[1:].reshape(3, 2, 2)[None]))
    assert len(graph) == 2  # the sum, and the copy to the output
    x.fill_(1)
    graph.replay()
    assert out == 12


def test_a_no_op_on_a_temporary_costs_no_call() -> None:
    x = torch.zeros(4)
    graph = tape(x)
    graph.capture(lambda: (x + 1).detach().contiguous().view(4).float().add_(1))
    assert len(graph) == 3  # add, add_, and the copy to the output


def test_an_assertion_is_replayed() -> None:
    x = torch.ones(4)
    graph = tape(x)
    graph.capture(lambda: torch.ops.aten._assert_async(x.sum() > 0))
    graph.replay()
    x.zero_()
    with pytest.raises(RuntimeError, match="nonzero"):
        graph.replay()


def test_views_of_temporaries_follow_the_temporary() -> None:
    x = torch.arange(6.0)
    graph = tape(x)

    def step() -> Tensor:
        grid = (x + 1).view(2, 3)
        row = grid[1]
        row.mul_(10)
        grid.t()[0].add_(100)
        return grid

    out = graph.capture(step)
    x.zero_()
    graph.replay()
    assert out.tolist() == [[101, 1, 1], [110, 10, 10]]


def test_a_tensor_reshaped_in_place_is_followed() -> None:
    x = torch.arange(3.0)
    graph = tape(x)

    def step() -> tuple[Tensor, Tensor]:
        y = x * 2
        same = y.detach()
        same.unsqueeze_(0)
        y.add_(1)
        view = x[1:]
        shown = view + 0
        view.unsqueeze_(1)
        return same @ y, shown + view

    out = graph.capture(step)
    for _ in range(2):
        x.add_(1)
        y = x * 2 + 1
        graph.replay()
        assert torch.equal(out[0], y[None] @ y)
        assert torch.equal(out[1], x[1:] + x[1:, None])
    assert x.shape == (3,)


def test_out_variants_may_grow_a_temporary() -> None:
    x = torch.arange(3.0)
    graph = tape(x)

    def step() -> Tensor:
        room = torch.empty(0)
        torch.add(x, 1, out=room)
        return room * 2

    out = graph.capture(step)
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [10, 10, 10]


# ---- what is refused


def test_a_stray_tensor_is_named_with_operator_and_line() -> None:
    x, stray = torch.ones(3), torch.ones(3, dtype=torch.float64)
    with pytest.raises(CaptureError) as caught:
        tape(x).capture(lambda: x + stray)
    message = str(caught.value)
    assert message.startswith("aten::add.Tensor uses a tensor float64 [3] on cpu")
    line = test_a_stray_tensor_is_named_with_operator_and_line.__code__.co_firstlineno + 3
    assert f"{__file__}:{line}" in message


def test_a_stray_scalar_tensor_is_refused_too() -> None:
    x, temperature = torch.ones(3), torch.ones(())
    with pytest.raises(CaptureError, match=r"a tensor float32 \[\]"):
        tape(x).capture(lambda: x / temperature)


def test_a_stray_inside_a_list_argument_is_seen() -> None:
    x, stray = torch.ones(3), torch.ones(3)
    with pytest.raises(CaptureError, match="aten::cat"):
        tape(x).capture(lambda: torch.cat([x, stray]))


def test_a_stray_destination_is_seen() -> None:
    x, stray = torch.ones(3), torch.zeros(3)
    with pytest.raises(CaptureError, match=r"aten::add\.out"):
        tape(x).capture(lambda: torch.add(x, 1, out=stray))
    assert stray.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.resize_(1),
        lambda x: x.set_(torch.ones(3)),
        lambda x: torch.ones(8, out=x),
    ],
    ids=["resize_", "set_", "out= grows it"],
)
def test_moving_a_static_tensor_is_refused(move: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"another storage|moved a static"):
        tape(x).capture(lambda: move(x))


def test_a_host_read_during_capture_is_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(HostSync, match=r"Tensor\.__bool__"):
        tape(x).capture(lambda: x + 1 if x.any() else x)


def test_static_must_be_a_tree_of_tensors() -> None:
    with pytest.raises(CaptureError, match=r"static\[1\] is a generator"):
        TapeGraph((torch.ones(1), (t for t in [torch.ones(1)])))


def test_a_module_registers_its_parameters_and_buffers() -> None:
    layer = torch.nn.BatchNorm1d(3).eval()
    x = torch.ones(2, 3)
    graph: TapeGraph[Tensor] = TapeGraph({"model": layer, "x": x}, poison=True)
    out = graph.capture(lambda: layer(x))
    x.fill_(3)
    graph.replay()
    assert torch.allclose(out, torch.full((2, 3), 3.0), atol=1e-4)


def test_replay_under_another_default_dtype_is_refused() -> None:
    ids = torch.ones(2, dtype=torch.int64)
    graph = tape(ids)
    graph.capture(lambda: ids * 0.5)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(CaptureError, match=r"float32"):
            graph.replay()
    finally:
        torch.set_default_dtype(torch.float32)


# ---- surroundings


def test_replay_runs_under_an_outer_guard() -> None:
    x = torch.ones(3)
    graph = tape(x)
    out = graph.capture(lambda: x[torch.arange(3)] * 2)
    with no_host_sync() as log:
        graph.replay()
    assert out.tolist() == [2, 2, 2]
    assert not log.reads


def test_replay_does_not_depend_on_the_grad_mode_of_capture(grad_mode: GradMode) -> None:
    x = torch.ones(3)
    graph = tape(x)
    out = graph.capture(lambda: x.mul_(2).view(3, 1) + 1)
    for replayed_in in (torch.inference_mode(False), torch.inference_mode(), torch.no_grad()):
        with replayed_in:
            graph.replay()
    assert out.flatten().tolist() == [9, 9, 9]


def test_parameters_that_want_gradients_give_outputs_that_do_not() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.nn.Parameter(torch.ones(2, 2))
        x = torch.ones(2)
        graph: TapeGraph[Tensor] = TapeGraph((weight, x), poison=True)
        out = graph.capture(lambda: weight @ x)
        graph.replay()
        assert out.tolist() == [2, 2]
        assert not out.requires_grad


def test_graphs_may_share_static_tensors() -> None:
    x = torch.zeros(2)
    first, second = tape(x), tape(x)
    first.capture(lambda: x.add_(1))
    second.capture(lambda: x.mul_(3))
    first.replay()
    second.replay()
    first.replay()
    assert x.tolist() == [4, 4]


def test_temporaries_die_after_their_last_use() -> None:
    x, held = torch.ones(2), list[weakref.ref[Tensor]]()
    library = torch.library.Library("freewheel_tape_lifetimes", "DEF")
    library.define("watch(Tensor x) -> Tensor")
    library.define("alive(Tensor x) -> Tensor")

    def watch(y: Tensor) -> Tensor:
        out = y + 1
        held.append(weakref.ref(out))
        return out

    library.impl("watch", watch, "CPU")
    library.impl("alive", lambda y: y + (held[-1]() is not None), "CPU")
    ops = torch.ops.freewheel_tape_lifetimes
    graph = tape(x)
    out = graph.capture(lambda: ops.alive(ops.watch(x).sum()))
    graph.replay()
    assert out == 4
    assert held[-1]() is None
    library._destroy()


def test_the_listing_shows_temporaries_and_frozen_operands() -> None:
    x = torch.ones(2, 3)
    graph = tape(x)
    graph.capture(lambda: torch.cat([x * 2, x]).topk(1))
    assert graph.listing.splitlines() == [
        "t1 = aten::mul.Tensor(float32 [2, 3], 2)",
        "t2 = aten::cat([t1, float32 [2, 3]])",
        "[t3, t4] = aten::topk(t2, 1)",
        "aten::copy_(float32 [4, 1], t3)",
        "aten::copy_(int64 [4, 1], t4)",
    ]


def test_an_empty_function_is_a_graph() -> None:
    graph = tape()
    assert graph.capture(lambda: None) is None
    assert graph.replay() is None
    assert len(graph) == 0


@pytest.mark.parametrize("mode", [CaptureAudit, Recorder, Rewind])
def test_a_mode_is_free_of_the_compilers_wrapper(mode: type) -> None:
    """The wrapper would import `torch._dynamo` at the first capture: a second of waiting."""
    assert "__wrapped__" not in vars(vars(mode)["__torch_dispatch__"])
