# SPDX-License-Identifier: Apache-2.0
"""Steps of a DeepSeek-V4 layer: what every op that joins others promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel import ops
from freewheel.graph import no_host_sync, trace_on_meta
from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import Sizes, assert_close
from tests.ops.step_cases import HEAVY_CASES, STEP_CASES, WINDOW_CASES, results

EVERY_STEP = pytest.mark.parametrize("name", sorted(STEP_CASES))
SIZES = st.builds(
    Sizes,
    batch=st.integers(0, 4),
    width=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)


def registered(name: str) -> Any:
    return getattr(torch.ops.freewheel, name).default


def test_every_step_is_covered_here() -> None:
    homes = {f"freewheel.ops.{name}" for name in ("placing", "sharing", "steps")}
    declared = {n for n, body in SPECIFICATIONS.items() if body.__module__ in homes}
    assert declared == set(STEP_CASES)
    assert declared <= set(ops.__all__)


@EVERY_STEP
@given(of=SIZES)
@settings(max_examples=25, deadline=None)
def test_the_cpu_body_agrees_with_the_specification(name: str, of: Sizes) -> None:
    for cases in (STEP_CASES, HEAVY_CASES, WINDOW_CASES):
        if name in cases:
            args = cases[name](of)
            found, wanted = (
                results(name, body, args) for body in (registered(name), SPECIFICATIONS[name])
            )
            for one, other in zip(found, wanted, strict=True):
                assert_close(one, other)


@EVERY_STEP
def test_schema_and_fake_describe_the_op(name: str) -> None:
    checks = ("test_schema", "test_faketensor")
    # opcheck compares what it mutated by arithmetic that PyTorch does not have for FP8
    own = HEAVY_CASES if name == "shared_products" else STEP_CASES
    for cases in (own, WINDOW_CASES):
        if name in cases:
            torch.library.opcheck(registered(name), cases[name](Sizes()), test_utils=checks)


@EVERY_STEP
def test_a_specification_reads_nothing_on_the_host_and_runs_on_any_device(name: str) -> None:
    args = STEP_CASES[name](Sizes())
    with no_host_sync():
        wanted = SPECIFICATIONS[name](*args)
    many = wanted if isinstance(wanted, tuple) else () if wanted is None else (wanted,)
    on_meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in args)
    for body in (SPECIFICATIONS[name], registered(name)):
        traced = trace_on_meta(body, *on_meta)
        shapes = traced if isinstance(traced, tuple) else () if traced is None else (traced,)
        assert [(t.shape, t.dtype) for t in shapes] == [(t.shape, t.dtype) for t in many]


@EVERY_STEP
def test_a_poisoned_neighbour_changes_nothing(name: str) -> None:
    args = STEP_CASES[name](Sizes(batch=3, width=4, dtype=torch.float64))
    bad = tuple(
        a.index_fill(0, torch.tensor([1]), torch.nan)
        if isinstance(a, Tensor) and a.is_floating_point() and a.shape[:2] == (3, 4)
        else a
        for a in args
    )
    for body in (SPECIFICATIONS[name], registered(name)):
        clean, dirty = results(name, body, args), results(name, body, bad)
        for one, other in zip(clean, dirty, strict=True):
            if one.shape[:2] == (3, 4):
                assert torch.equal(one[[0, 2]], other[[0, 2]])
            else:  # a cache: rows that another row of the batch did not write
                same = (one == other).all(-1) | other.isnan().any(-1)
                assert same.all()
