# SPDX-License-Identifier: Apache-2.0
"""What rank 0 says is what the others hear, every field of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from freewheel.config import EngineConfig
from freewheel.runtime.parallel.channel import Channel, Order, Task
from freewheel.spec import TABLES, StepShape

LADDERS = [EngineConfig(model="demo", speculate=depth).ladder() for depth in (0, 3, "auto")]


def channel(patch: pytest.MonkeyPatch, wire: list[Tensor], hears: bool) -> Channel:
    groups: Any = SimpleNamespace(rank=int(hears), ranks=2)
    made = Channel(groups, lambda: "")

    def send(tensor: Tensor) -> None:
        if hears:
            tensor.copy_(wire.pop())
        else:
            wire.append(tensor.clone())

    patch.setattr(made, "_send", send)
    return made


@pytest.mark.parametrize("ladder", LADDERS, ids=["none", "three", "auto"])
def test_every_shape_that_an_engine_may_run_reaches_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch, ladder: Any
) -> None:
    wire: list[Tensor] = []
    leader, follower = (channel(monkeypatch, wire, hears) for hears in (False, True))
    shapes: set[StepShape] = {TABLES, *ladder.shapes(3, guided=True)}
    assert any(shape.guided for shape in shapes) and any(shape.tables for shape in shapes)
    for number, shape in enumerate(shapes):
        order = Order(Task.ROUND, number, 4 * number, shape)
        leader.tell(order)
        heard = follower.hear()
        assert heard == order
        assert [type(value) for value in vars(heard.shape).values()] == [
            type(value) for value in vars(shape).values()
        ]
