# SPDX-License-Identifier: Apache-2.0
"""CUDA bodies agree with their specifications on what the models that ship here give them.

The calls are recorded on the CPU, so that they are the same on every card.
"""

from __future__ import annotations

import pytest

from freewheel.ops import load_kernels
from tests.ops.kernel_device import DEVICE, needs_gpu, needs_kernels
from tests.ops.recorded import KINDS, ROUGHER, faults, recorded, recorded_packed, shapes, twisted

pytestmark = [needs_kernels, pytest.mark.slow]
DTYPES = ["float32", pytest.param("bfloat16", marks=needs_gpu)]
"""The interpreter multiplies no bfloat16 matrices."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_bodies_agree_on_the_inputs_of_real_rounds(model: str, dtype: str) -> None:
    load_kernels("cuda")
    assert faults(recorded(model, dtype), "cuda", DEVICE) == []


@needs_gpu
@pytest.mark.parametrize(
    ("model", "to"), [("demo", "fp8"), ("demo-v4", "fp8"), ("demo-v4", "mxfp4")]
)
def test_bodies_agree_on_the_inputs_of_real_rounds_over_packed_numbers(model: str, to: str) -> None:
    load_kernels("cuda")
    assert "\n".join(faults(recorded_packed(model, to), "cuda", DEVICE)) == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_bodies_agree_on_the_worst_of_activations(model: str, dtype: str, kind: str) -> None:
    load_kernels("cuda")
    calls = shapes(recorded(model, dtype))
    twists = (twisted(call, kind) for call in calls)
    assert faults(twists, "cuda", DEVICE, ROUGHER.get(kind, 1)) == []
