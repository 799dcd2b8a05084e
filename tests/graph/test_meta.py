# SPDX-License-Identifier: Apache-2.0
"""`trace_on_meta`: production dimensions without memory, and who is named if it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.errors import CaptureError, HostSync
from freewheel.graph import calls_on_meta, trace_on_meta

GradMode = Callable[[], Any]


@pytest.fixture(autouse=True)
def _both_grad_modes(grad_mode: GradMode):
    with grad_mode():
        yield


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_function_runs_at_dimensions_that_no_memory_holds() -> None:
    weight, tokens = on_meta(1 << 20, 1 << 20), on_meta(256, 8, 1 << 20)  # 4 TiB and 8 GiB
    out = trace_on_meta(lambda w, t: (t @ w).softmax(-1).topk(2048), weight, tokens)
    assert [tuple(t.shape) for t in out] == [(256, 8, 2048)] * 2
    assert out[1].dtype == torch.int64
    assert {t.device.type for t in out} == {"meta"}


def test_tensors_may_be_closed_over_and_written() -> None:
    cache, slots = on_meta(1 << 30, 576), on_meta(64, dtype=torch.int64)

    def step() -> Tensor:
        cache[slots] = torch.zeros(64, 576, device="meta")
        return cache[slots[:4]]

    assert trace_on_meta(step).shape == (4, 576)


def test_a_module_made_on_meta_runs() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(7168, 129280), torch.nn.SiLU())
    assert trace_on_meta(model, on_meta(2, 7168)).shape == (2, 129280)


def test_a_forgotten_device_is_named_where_the_tensor_is_made() -> None:
    def step(x: Tensor) -> Tensor:
        column = torch.arange(4)
        return x + column

    line = step.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError) as caught:
        trace_on_meta(step, on_meta(4))
    assert "aten::arange makes a tensor on cpu" in str(caught.value)
    assert f"{__file__}:{line}" in str(caught.value)


def test_a_real_tensor_closed_over_is_named_where_it_is_used() -> None:
    table = torch.ones(4)
    with pytest.raises(CaptureError, match=r"aten::\S+ takes a tensor on cpu.*test_meta\.py:\d+"):
        trace_on_meta(lambda x: x * table, on_meta(4))


def test_a_value_is_named_where_it_is_read() -> None:
    def step(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return x + 1

    line = step.__code__.co_firstlineno + 1
    with pytest.raises(HostSync) as caught:
        trace_on_meta(step, on_meta(4))
    assert f"{__file__}:{line}" in str(caught.value)


def test_an_operator_whose_shape_depends_on_values_is_named() -> None:
    """One that no tag betrays to the guard: the operator's own fake says so."""
    library = torch.library.Library("freewheel_meta_dynamic", "DEF")
    library.define("keep(Tensor x) -> Tensor")
    library.impl("keep", lambda x: x[x > 0], "CPU")

    @torch.library.register_fake("freewheel_meta_dynamic::keep", lib=library)
    def _(x: Tensor) -> Tensor:
        size = torch.library.get_ctx().new_dynamic_size()
        return x.new_empty(size)

    with pytest.raises(HostSync, match=r"keep.*test_meta\.py:\d+"):
        trace_on_meta(lambda: torch.ops.freewheel_meta_dynamic.keep(on_meta(4)))
    library._destroy()


def test_an_operator_without_a_fake_is_named() -> None:
    library = torch.library.Library("freewheel_meta_bare", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    with pytest.raises(CaptureError, match=r"twice.*no fake.*test_meta\.py:\d+"):
        trace_on_meta(lambda: torch.ops.freewheel_meta_bare.twice(on_meta(4)))
    library._destroy()


def test_an_operator_runs_its_fake(ops: Any) -> None:
    cache, values = on_meta(1 << 30, 512), on_meta(64, 512)
    slots = on_meta(64, dtype=torch.int64)
    assert trace_on_meta(ops.store, cache, values, slots).shape == (64,)


def test_an_ordinary_error_stays_itself() -> None:
    with pytest.raises(RuntimeError) as caught:
        trace_on_meta(lambda x: x @ x, on_meta(3, 4))
    assert not isinstance(caught.value, (HostSync, CaptureError))


def test_nothing_is_left_behind_after_an_error() -> None:
    with pytest.raises(HostSync):
        trace_on_meta(lambda x: x.tolist(), on_meta(4))
    assert torch.ones(2).tolist() == [1, 1]


def test_calls_are_counted_by_name_and_views_are_not() -> None:
    x = torch.empty(4, 6, device="meta")
    weight = torch.empty(3, 6, device="meta")

    def fn() -> torch.Tensor:
        out = x.T[:2].reshape(-1) * 2  # a slice is a view, its copy is not
        x.add_(1)
        return torch.nn.functional.linear(x.view(2, 2, 6), weight) + out[0]

    calls = calls_on_meta(fn)
    assert calls["aten::mm"] + calls["aten::linear"] == 1  # inference mode keeps composites whole
    assert calls["aten::add_.Tensor"] == calls["aten::mul.Tensor"] == 1
    assert not any(name.endswith(("view", "::t", "slice.Tensor", "::device")) for name in calls)
