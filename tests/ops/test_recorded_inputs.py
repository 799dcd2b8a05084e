# SPDX-License-Identifier: Apache-2.0
"""CPU bodies agree with their specifications on what the models that ship here give them."""

from __future__ import annotations

import pytest

from freewheel.ops import IMPLEMENTATIONS, load_kernels
from tests.ops.near_codes import moves
from tests.ops.packed_cases import filled
from tests.ops.recorded import (
    KINDS,
    ROUGHER,
    faults,
    recorded,
    recorded_packed,
    shapes,
    twisted,
)


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
    twists = (twisted(call, kind) for call in calls)
    assert faults(twists, "cpu", "cpu", ROUGHER.get(kind, 1)) == []


def test_a_body_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels("cpu")
    calls = shapes(recorded("demo", "float32"))
    name = "sparse_mla_values"
    honest = IMPLEMENTATIONS[name, "cpu"]
    monkeypatch.setitem(IMPLEMENTATIONS, (name, "cpu"), lambda *args: honest(*args) * (1 + 1e-4))
    named = faults(calls, "cpu", "cpu")
    assert named
    assert all(one.startswith(f"{name}: result 0: ") for one in named)


@pytest.mark.parametrize("name", ["latents", "index", "keys"])
def test_a_few_codes_may_be_the_next_ones_but_not_many_and_none_far_away(name: str) -> None:
    rows = filled(name, 1, 2)
    near, far, many = rows.clone(), rows.clone(), rows.clone()
    near[1, 0, 8] ^= 1
    far[1, 0, 8] ^= 8
    many[1].view(-1)[: 4 * 128] ^= 1
    assert moves(rows.clone(), rows) is None
    assert moves(near, rows) is None
    assert moves(far, rows) is not None
    assert moves(many, rows) is not None
