# SPDX-License-Identifier: Apache-2.0
"""Random programs: a replay is a run of the function, whatever the static tensors hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.graph import EagerGraph, Graph, TapeGraph

N = 4  # every tensor of a program is float64 [N, N], so that any instruction fits any operand
Instruction = tuple[str, int, int, int]
Programme = list[Instruction]


class Machine:
    """Static tensors `state`, and the instructions' own growing stack of temporaries."""

    def __init__(self, ops: Any, seed: int) -> None:
        self.ops = ops
        generator = torch.Generator().manual_seed(seed)
        self.state = [torch.randn(N, N, generator=generator).double() for _ in range(3)]
        self.ids = torch.randint(0, N, (N,), generator=generator)  # int64 [N]

    def tensors(self) -> list[Tensor]:
        return [*self.state, self.ids]

    def run(self, programme: Programme) -> dict[str, Any]:
        stack = list(self.state)
        for name, a, b, k in programme:
            x, y = stack[a % len(stack)], stack[b % len(stack)]
            result = INSTRUCTIONS[name](self, x, y, k)
            if result is not None:
                stack.append(result)
        made = stack[len(self.state) :]
        return {"last": made[-3:], "rows": [t[0] for t in made[:2]], "state": self.state[0][1:]}


def _in_place(x: Tensor, y: Tensor) -> None:
    x.mul_(0.5).add_(y.tanh())


def _reshape_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = (x + y).detach()
    z.unsqueeze_(0).transpose_(1, 2)
    z.squeeze_(0)
    return z


def _write_rows(x: Tensor, y: Tensor, ids: Tensor) -> None:
    x[ids] = y.clone()[ids].tanh()


def _move_ids(ids: Tensor, k: int) -> None:
    ids.add_(k).remainder_(N)


def _out(x: Tensor, y: Tensor) -> Tensor:
    room = torch.empty(0, dtype=torch.float64)
    torch.add(x.tanh(), y.tanh(), out=room)
    return room


def _columns(x: Tensor, y: Tensor) -> Tensor:
    first, *others = x.unbind(1)
    return torch.stack([*others, first + y[0]], 1)


INSTRUCTIONS: dict[str, Callable[[Machine, Tensor, Tensor, int], Tensor | None]] = {
    "add": lambda m, x, y, k: x + y * k,
    "matmul": lambda m, x, y, k: (x @ y).tanh(),
    "einsum": lambda m, x, y, k: torch.einsum("ij,kj->ik", x, y).tanh(),
    "transpose": lambda m, x, y, k: x.t(),
    "reshape": lambda m, x, y, k: x.reshape(2, -1).reshape(N, N),
    "expand": lambda m, x, y, k: x[k % N].expand(N, N),
    "flip": lambda m, x, y, k: x.flip(0),
    "roll": lambda m, x, y, k: x.roll(k, 1),
    "sort": lambda m, x, y, k: x.sort(dim=1, stable=True)[0],
    "topk": lambda m, x, y, k: x.topk(N, dim=1)[1].double(),
    "cumsum": lambda m, x, y, k: x.cumsum(k % 2).tanh(),
    "where": lambda m, x, y, k: torch.where(x > y, x, float(k)),
    "mask": lambda m, x, y, k: x.masked_fill(torch.arange(N) < k, -1.0),
    "gather": lambda m, x, y, k: x[m.ids],
    "columns": lambda m, x, y, k: _columns(x, y),
    "out": lambda m, x, y, k: _out(x, y),
    "reshape in place": lambda m, x, y, k: _reshape_in_place(x, y),
    "detach": lambda m, x, y, k: x.detach(),
    "constant": lambda m, x, y, k: torch.full((N, N), float(k), dtype=torch.float64),
    "store": lambda m, x, y, k: m.ops.store(m.state[k % 3], y.clone().tanh(), m.ids)[:, None] + x,
    "in place": lambda m, x, y, k: _in_place(m.state[k % 3], y),
    "in place on a copy": lambda m, x, y, k: x.clone().sub_(y).tanh_(),
    "in place on a view": lambda m, x, y, k: _in_place(m.state[k % 3][k % N], y[0].clone()),
    "rows": lambda m, x, y, k: _write_rows(m.state[k % 3], y, m.ids),
    "scalar": lambda m, x, y, k: m.state[k % 3].__setitem__((k % N, 0), 0.25),
    "ids": lambda m, x, y, k: _move_ids(m.ids, k),
}

instruction = st.tuples(
    st.sampled_from(sorted(INSTRUCTIONS)),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 7),
)
programmes = st.lists(instruction, min_size=1, max_size=25)


def _values(output: dict[str, Any]) -> list[Tensor]:
    return [t.clone() for t in (*output["last"], *output["rows"], output["state"])]


def _check(graph: Graph[Any], machine: Machine, reference: Machine, programme: Programme) -> None:
    output = graph.capture(lambda: machine.run(programme))
    for t, kept in zip(machine.tensors(), reference.tensors(), strict=True):
        assert torch.equal(t, kept)
    for _ in range(3):
        wanted = _values(reference.run(programme))
        replayed = graph.replay()
        assert replayed is output
        for got, want in zip(_values(replayed), wanted, strict=True):
            assert torch.equal(got, want)
        for got, want in zip(machine.tensors(), reference.tensors(), strict=True):
            assert torch.equal(got, want)
        for t, kept in zip(machine.tensors(), reference.tensors(), strict=True):
            t.copy_(kept.flip(0))
            kept.copy_(kept.flip(0))


@pytest.mark.parametrize("kind", ["tape", "eager"])
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(programme=programmes, seed=st.integers(0, 9))
def test_replay_equals_the_function(
    grad_mode: Callable[[], Any], ops: Any, kind: str, programme: Programme, seed: int
) -> None:
    with grad_mode():
        machine, reference = Machine(ops, seed), Machine(ops, seed)
        graph: Graph[Any] = EagerGraph(guard=True)
        if kind == "tape":
            graph = TapeGraph(machine.tensors(), poison=True)
        _check(graph, machine, reference, programme)
