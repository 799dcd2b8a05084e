# SPDX-License-Identifier: Apache-2.0
"""What every op of attention, caches and dense layers promises, one test for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel import ops
from freewheel.graph import no_host_sync, trace_on_meta
from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS
from tests.ops.cases import CASES as TOKEN_CASES
from tests.ops.cases import Sizes, assert_close
from tests.ops.quantised_cases import QUANTISED_CASES
from tests.ops.stream_cases import STREAM_CASES

CASES = TOKEN_CASES | STREAM_CASES | QUANTISED_CASES
EVERY_OP = pytest.mark.parametrize("name", sorted(CASES))
WRITTEN = {
    "store_latent": -1,
    "store_index_key": -1,
    "norm_latents": -1,
    "index_queries": -1,
    "place_queries": 11,
    "store_key": -1,
    "store_raw": -1,
    "compress": 7,
}
"""Ops that write rows of their first argument, and which argument says where."""

STORES = tuple(WRITTEN)
SIZES = st.builds(
    Sizes,
    batch=st.integers(0, 4),
    width=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)


def arguments(name: str, of: Sizes | None = None) -> tuple[Any, ...]:
    return CASES[name](name, of or Sizes())


def written(name: str, args: tuple[Any, ...], rows: int | list[int]) -> Tensor:
    """int64: slots that those rows of the batch write."""
    return args[WRITTEN[name]][rows].flatten()


def outputs(name: str, body: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What the op returns; behind its cache, if it writes one."""
    args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    result = body(*args)
    if name == "compress":
        args[0][0, 0] = 0  # scratch: where windows go that are none, if anywhere
    returned = result if isinstance(result, tuple) else () if result is None else (result,)
    return (args[0], *returned) if name in STORES else returned


def registered(name: str) -> Any:
    return getattr(torch.ops.freewheel, name).default


def test_every_op_of_these_files_is_covered_here() -> None:
    names = ("attention", "cache", "dense", "clamped", "compressed", "hyper", "latents")
    names = (*names, "quantised", "repacking", "sinks")
    files = [f"freewheel.ops.{name}" for name in names]
    declared = {name for name, body in SPECIFICATIONS.items() if body.__module__ in files}
    assert declared == set(CASES)
    assert declared <= set(ops.__all__)


@EVERY_OP
@given(of=SIZES)
@settings(max_examples=25, deadline=None)
def test_the_cpu_body_agrees_with_the_specification(name: str, of: Sizes) -> None:
    args = arguments(name, of)
    expected = outputs(name, SPECIFICATIONS[name], args)
    for actual, wanted in zip(outputs(name, registered(name), args), expected, strict=True):
        assert_close(actual, wanted)


@EVERY_OP
@pytest.mark.parametrize("batch", [0, 2])
def test_schema_and_fake_describe_the_op(name: str, batch: int) -> None:
    args = arguments(name, Sizes(batch))
    bytes_of = [a.view(torch.uint8).clone() for a in args if _is_fp8(a)]
    checks = ["test_faketensor"] if bytes_of else ["test_schema", "test_faketensor"]
    torch.library.opcheck(registered(name), args, test_utils=checks)
    registered(name)(*args)  # test_schema cannot compare FP8: no such argument may change
    after = [a.view(torch.uint8) for a in args if _is_fp8(a)]
    assert all(torch.equal(a, b) for a, b in zip(after, bytes_of, strict=True))


def _is_fp8(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn


@EVERY_OP
def test_a_specification_reads_nothing_on_the_host(name: str) -> None:
    args = arguments(name)
    with no_host_sync():
        SPECIFICATIONS[name](*args)


@EVERY_OP
def test_a_specification_runs_on_any_device_and_its_fake_gives_the_same_shapes(name: str) -> None:
    args = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in arguments(name))
    wanted = outputs(name, SPECIFICATIONS[name], arguments(name))
    for body in (SPECIFICATIONS[name], registered(name)):
        result = trace_on_meta(body, *args)
        traced = result if isinstance(result, tuple) else () if result is None else (result,)
        made = wanted[1:] if name in STORES else wanted
        assert [(t.shape, t.dtype) for t in traced] == [(t.shape, t.dtype) for t in made]


@EVERY_OP
def test_an_empty_batch_is_no_crash_and_gives_zero_rows(name: str) -> None:
    args = arguments(name, Sizes(batch=0))
    for body in (SPECIFICATIONS[name], registered(name)):
        for nth, result in enumerate(outputs(name, body, args)):
            cache = name in STORES and nth == 0
            assert torch.equal(result, args[0]) if cache else result.shape[0] == 0


@EVERY_OP
@pytest.mark.parametrize("batch", [5, 7])
def test_a_row_alone_gives_what_it_gives_in_a_batch(name: str, batch: int) -> None:
    """Among them more rows than index heads, and neighbours full of NaN."""
    args = arguments(name, Sizes(batch, width=4, dtype=torch.float64))
    split = [isinstance(a, Tensor) and a.dim() > 0 and a.shape[0] == batch for a in args]
    for body in (SPECIFICATIONS[name], registered(name)):
        together = outputs(name, body, args)
        for b in range(batch):
            alone = [a[b : b + 1] if per_row else a for a, per_row in zip(args, split, strict=True)]
            pairs = zip(outputs(name, body, tuple(alone)), together, strict=True)
            for nth, (one, all_) in enumerate(pairs):
                if name in STORES and nth == 0:
                    own = written(name, args, b)
                    assert_close(one.view(-1, 24)[own], all_.view(-1, 24)[own])
                else:
                    assert_close(one[0], all_[b])


@EVERY_OP
def test_a_poisoned_neighbour_changes_nothing(name: str) -> None:
    args = arguments(name, Sizes(batch=3, width=4))

    def poisoned(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        if not floats or value.shape[:2] != (3, 4):
            return value
        value = value.clone()
        value[1] = float("nan")
        return value

    for body in (SPECIFICATIONS[name], registered(name)):
        clean = outputs(name, body, args)
        dirty = outputs(name, body, tuple(poisoned(a) for a in args))
        for nth, (good, bad) in enumerate(zip(clean, dirty, strict=True)):
            if name in STORES and nth == 0:
                own = written(name, args, [0, 2])
                assert torch.equal(good.view(-1, 24)[own], bad.view(-1, 24)[own])
            else:
                assert torch.equal(good[[0, 2]], bad[[0, 2]])


@pytest.mark.parametrize("name", sorted({name for name, _ in IMPLEMENTATIONS} & set(CASES)))
def test_a_call_on_the_cpu_reaches_the_cpu_body(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"freewheel::{name}", "CPU")
