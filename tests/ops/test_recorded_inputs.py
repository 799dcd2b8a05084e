# SPDX-License-Identifier: Apache-2.0
"""CPU bodies agree with their specifications on what the models that ship here give them."""

from __future__ import annotations

import pytest

from freewheel.ops import IMPLEMENTATIONS, load_kernels
from tests.ops.recorded import KINDS, faults, recorded, recorded_packed, shapes, twisted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_bodies_agree_on_the_inputs_of_real_rounds(model: str, dtype: str) -> None:
    load_kernels("cpu")
    assert faults(recorded(model, dtype), "cpu", "cpu") == []


@pytest.mark.parametrize(("model", "to"), [("demo", "fp8"), ("demo-v4", "mxfp4")])
def test_bodies_agree_on_the_inputs_of_real_rounds_over_packed_numbers(model: str, to: str) -> None:
    load_kernels("cpu")
    assert faults(shapes(recorded_packed(model, to)), "cpu", "cpu") == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_bodies_agree_on_the_worst_of_activations(model: str, kind: str) -> None:
    load_kernels("cpu")
    calls = shapes(recorded(model, "float32"))
    assert faults((twisted(call, kind) for call in calls), "cpu", "cpu") == []


def test_a_body_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels("cpu")
    calls = shapes(recorded("demo", "float32"))
    honest = IMPLEMENTATIONS["sparse_mla", "cpu"]
    monkeypatch.setitem(
        IMPLEMENTATIONS, ("sparse_mla", "cpu"), lambda *args: honest(*args) * (1 + 1e-4)
    )
    named = faults(calls, "cpu", "cpu")
    assert named
    assert all(one.startswith("sparse_mla: result 0: ") for one in named)
