# SPDX-License-Identifier: Apache-2.0
"""`TapeGraph`: what it may return, the operators that it records, the memory that it poisons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from freewheel.errors import CaptureError
from freewheel.graph import POISON_INT, TapeGraph

GradMode = Callable[[], Any]


@pytest.fixture(autouse=True)
def _both_grad_modes(grad_mode: GradMode):
    with grad_mode():
        yield


def tape(*static: Tensor) -> TapeGraph[Any]:
    return TapeGraph(static, poison=True)


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
