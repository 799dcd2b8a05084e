# SPDX-License-Identifier: Apache-2.0
"""`TapeGraph`: what is frozen, what is live, what is refused, and that replay equals eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from freewheel.errors import CaptureError, HostSync
from freewheel.graph import POISON_INT, CaptureAudit, TapeGraph, no_host_sync

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


# ---- outputs


@dataclass(frozen=True)
class Emission:
    tokens: Tensor
    count: Tensor | None
    width: int


class Pair(NamedTuple):
    first: Tensor
    second: list[Tensor]


def test_an_output_may_be_any_tree() -> None:
    x = torch.ones(2)
    graph = tape(x)
    out = graph.capture(lambda: (Emission(x + 1, None, 4), Pair(x * 3, [x - 1, x]), None, "round"))
    x.fill_(5)
    graph.replay()
    emission, pair, nothing, name = out
    assert emission.tokens.tolist() == [6, 6]
    assert (emission.count, emission.width, nothing, name) == (None, 4, None, "round")
    assert pair.first.tolist() == [15, 15]
    assert pair.second[0].tolist() == [4, 4]


def test_an_output_of_another_kind_is_refused_with_its_path() -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=r"output\[1\]\['a'\] is a generator"):
        tape(x).capture(lambda: (x, {"a": (t for t in x)}))


def test_an_output_may_alias_a_static_tensor() -> None:
    x = torch.zeros(4)
    graph = tape(x)
    out = graph.capture(lambda: x.add_(1)[2:])
    graph.replay()
    assert out.data_ptr() == x[2:].data_ptr()
    assert out.tolist() == [1, 1]


def test_outputs_that_share_memory_still_do() -> None:
    x = torch.ones(3)
    graph = tape(x)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return y, y[1:], y.expand(4, 3)

    whole, part, wide = graph.capture(step)
    x.copy_(torch.tensor([1.0, 2, 3]))
    graph.replay()
    assert whole.tolist() == [2, 4, 6]
    assert part.tolist() == [4, 6]
    assert wide.tolist() == [[2, 4, 6]] * 4
    assert part.data_ptr() == whole[1:].data_ptr()


def test_the_same_tensor_may_be_returned_twice() -> None:
    x = torch.ones(3)
    graph = tape(x)
    a, b = graph.capture(lambda: (x + 1,) * 2)
    graph.replay()
    assert a.tolist() == b.tolist() == [2, 2, 2]


def test_an_output_that_the_graph_never_made_is_refused() -> None:
    x, stray = torch.ones(3), torch.ones(3)
    with pytest.raises(CaptureError, match=r"output\[1\] is neither static nor made"):
        tape(x).capture(lambda: (x + 1, stray))


# ---- operators of our own


def test_an_operator_that_writes_and_returns_is_one_call(ops: Any) -> None:
    cache, values, slots = torch.zeros(4, 2), torch.ones(2, 2), torch.tensor([0, 1])
    graph = tape(cache, values, slots)
    sums = graph.capture(lambda: ops.store(cache, values, slots))
    assert graph.counts == {"freewheel_graph_test::store": 1}
    assert not cache.any()
    values.fill_(7)
    slots.copy_(torch.tensor([3, 2]))
    graph.replay()
    assert cache.tolist() == [[0, 0], [0, 0], [7, 7], [7, 7]]
    assert sums.tolist() == [14, 14]


def test_an_operator_may_write_a_temporary(ops: Any) -> None:
    x, slots = torch.ones(2, 2), torch.tensor([1, 0])
    graph = tape(x, slots)

    def step() -> tuple[Tensor, Tensor]:
        room = torch.zeros(2, 2)
        sums = ops.store(room, x, slots)
        return room, sums

    room, sums = graph.capture(step)
    x.copy_(torch.tensor([[1.0, 2], [3, 4]]))
    graph.replay()
    assert room.tolist() == [[3, 4], [1, 2]]
    assert sums.tolist() == [3, 7]


def test_an_operator_that_returns_nothing_is_recorded(ops: Any) -> None:
    counter = torch.zeros((), dtype=torch.int32)
    graph = tape(counter)
    graph.capture(lambda: ops.bump(counter))
    assert counter == 0
    graph.replay()
    graph.replay()
    assert counter == 2


def test_an_operator_may_return_none_and_lists(ops: Any) -> None:
    x = torch.ones(2)
    graph = tape(x)

    def step() -> tuple[Any, Any]:
        return ops.split(x, None), ops.split(x, x + 5)

    (double, count, parts), (_, second_count, _) = graph.capture(step)
    x.fill_(10)
    graph.replay()
    assert double.tolist() == [20, 20]
    assert count is None
    assert [p.tolist() for p in parts] == [[11, 11], [12, 12]]
    assert second_count.tolist() == [16, 16]


def test_a_custom_op_made_by_decorator_is_one_call() -> None:
    @torch.library.custom_op("freewheel_graph_decorated::push", mutates_args=("cache",))
    def push(cache: Tensor, x: Tensor) -> Tensor:
        cache.add_(x.sum())
        return x * 2

    cache, x = torch.zeros(2), torch.ones(3)
    graph = tape(cache, x)
    out = graph.capture(lambda: push(cache, x))
    graph.replay()
    graph.replay()
    assert cache.tolist() == [6, 6]
    assert out.tolist() == [2, 2, 2]
    assert graph.counts == {"freewheel_graph_decorated::push": 1}


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


# ---- poison


def test_outputs_are_poison_until_the_first_replay() -> None:
    x, ids, flags = torch.ones(2), torch.ones(2, dtype=torch.int32), torch.zeros(2).bool()
    graph = tape(x, ids, flags)
    values, numbers, both = graph.capture(lambda: (x + 1, ids + 1, flags | flags))
    assert values.isnan().all()
    assert numbers.tolist() == [POISON_INT] * 2
    assert both.all()
    graph.replay()
    assert (values.tolist(), numbers.tolist(), both.tolist()) == ([2, 2], [2, 2], [False, False])


def test_a_reader_of_a_stale_temporary_sees_poison() -> None:
    x, leaked = torch.ones(2), list[Tensor]()
    graph = tape(x)

    def step() -> Tensor:
        hidden = x * 3
        leaked.append(hidden[1:])
        return hidden + 1

    out = graph.capture(step)
    for _ in range(2):
        graph.replay()
        assert out.tolist() == [4, 4]
        assert leaked[0].isnan().all()


@pytest.mark.parametrize(
    "room",
    [
        lambda x: torch.empty(4),
        torch.empty_like,
        lambda x: x.new_empty(4),
        lambda x: torch.empty_strided((4,), (1,)),
    ],
    ids=["empty", "empty_like", "new_empty", "empty_strided"],
)
def test_a_reader_of_uninitialised_memory_sees_poison(room: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(4)
    graph = tape(x)

    def step() -> Tensor:
        y = room(x)
        y[:3] = x[:3]
        return y + 1

    out = graph.capture(step)
    graph.replay()
    assert out[:3].tolist() == [2, 2, 2]
    assert out[3].isnan()


def test_a_narrow_integer_is_poisoned_with_its_largest_value() -> None:
    x = torch.zeros(2, dtype=torch.uint8)
    graph = tape(x)
    out = graph.capture(lambda: torch.empty_like(x) + 0)
    graph.replay()
    assert out.tolist() == [255, 255]


def test_poison_is_optional_and_changes_no_result() -> None:
    x = torch.arange(6.0)
    results = []
    for poison in (False, True):
        graph: TapeGraph[Tensor] = TapeGraph(x, poison=poison)
        out = graph.capture(lambda: (x.view(2, 3).softmax(-1) @ x.view(3, 2)).cumsum(0))
        graph.replay()
        results.append(out.clone())
    assert torch.equal(*results)


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
    x = torch.ones(2)
    graph = tape(x)
    graph.capture(lambda: torch.sum((x + 1) * 2))
    lines = [line.strip() for line in graph.listing.splitlines()]
    assert lines == [
        "def replay():",
        "t1 = aten_add_Tensor(c0, 1)",
        "t2 = aten_mul_Tensor(t1, 2)",
        "del t1",
        "t3 = aten_sum(t2)",
        "del t2",
        "aten_copy_(c4, t3)",
        "del t3",
    ]


def test_an_empty_function_is_a_graph() -> None:
    graph = tape()
    assert graph.capture(lambda: None) is None
    assert graph.replay() is None
    assert len(graph) == 0


def test_the_audit_works_without_a_tape(ops: Any) -> None:
    cache, x, slots = torch.zeros(4, 2), torch.ones(2, 2), torch.tensor([0, 1])
    with CaptureAudit((cache, x, slots)) as audit:
        for _ in range(3):
            ops.store(cache, x + 1, slots)
    assert audit.counts == {"aten::add.Tensor": 3, "freewheel_graph_test::store": 3}
    stray = pytest.raises(CaptureError, match=r"freewheel_graph_test::store uses a tensor")
    with stray, CaptureAudit((cache, slots)):
        ops.store(cache, x, slots)
