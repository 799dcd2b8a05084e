# SPDX-License-Identifier: Apache-2.0
"""What the graph tests share: both grad modes, and a library of operators like the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def grad_mode(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """A context as the engine enters it; PyTorch dispatches the two differently."""
    return request.param


def _store(cache: Tensor, values: Tensor, slots: Tensor) -> Tensor:
    cache.index_copy_(0, slots, values)
    return values.sum(-1)


def _bump(counter: Tensor) -> None:
    counter.add_(1)


def _split(x: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    return x * 2, None if count is None else count + 1, [x + 1, x + 2]


@pytest.fixture(scope="session")
def ops() -> Iterator[Any]:
    """Operators with opaque bodies: one writes and returns, one only writes, one returns a tree."""
    library = torch.library.Library("freewheel_graph_test", "DEF")
    library.define("store(Tensor(a!) cache, Tensor values, Tensor slots) -> Tensor")
    library.define("bump(Tensor(a!) counter) -> ()")
    library.define("split(Tensor x, Tensor? count) -> (Tensor, Tensor?, Tensor[])")
    library.impl("store", _store, "CompositeExplicitAutograd")
    library.impl("bump", _bump, "CPU")
    library.impl("split", _split, "CPU")
    yield torch.ops.freewheel_graph_test
    library._destroy()
