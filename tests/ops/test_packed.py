# SPDX-License-Identifier: Apache-2.0
"""Packed rows: what a store writes, what a read gives back, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel import ops
from freewheel.graph import no_host_sync, trace_on_meta
from freewheel.ops import SPECIFICATIONS
from freewheel.ops.codecs import decode_e8m0
from freewheel.ops.rows import (
    dequantise_tiles,
    quantise_powers,
    quantise_tiles,
    read_index_pages,
    read_keys,
    read_latents,
)
from tests.ops.cases import Sizes, assert_close, draw
from tests.ops.packed_cases import (
    DIM,
    KEY,
    PACKED_CASES,
    PAGE,
    RANK,
    ROPE,
    STORES,
    filled,
    numbers,
    poisoned,
    spread,
)

EVERY_OP = pytest.mark.parametrize("name", sorted(PACKED_CASES))
WHERE = {"fp8_place_queries": 11, "fp8_store_entries": 10, "fp8_store_index_entries": 10}
"""Which argument of a store says where it writes, if not the last."""


def arguments(name: str, of: Sizes | None = None) -> tuple[Any, ...]:
    return PACKED_CASES[name](name, of or Sizes())


def outputs(name: str, body: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What the op returns; behind the bytes of its cache but for the scratch page, if it stores."""
    args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    result = body(*args)
    returned = result if isinstance(result, tuple) else () if result is None else (result,)
    return (args[0][1:], *returned) if name in STORES else returned


def registered(name: str) -> Any:
    return vars(ops)[name]


def test_every_packed_op_has_a_case() -> None:
    assert {name for name in SPECIFICATIONS if name.startswith("fp8_")} == set(PACKED_CASES)


@EVERY_OP
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_the_cpu_body_agrees_with_the_specification(
    name: str, seed: int, dtype: torch.dtype
) -> None:
    args = arguments(name, Sizes(3, 4, seed, dtype))
    expected = outputs(name, SPECIFICATIONS[name], args)
    for actual, wanted in zip(outputs(name, registered(name), args), expected, strict=True):
        assert_close(actual, wanted)


@EVERY_OP
@pytest.mark.parametrize("batch", [0, 2])
def test_schema_and_fake_describe_the_op(name: str, batch: int) -> None:
    torch.library.opcheck(
        registered(name),
        arguments(name, Sizes(batch)),
        test_utils=["test_schema", "test_faketensor"],
    )


@EVERY_OP
def test_a_specification_reads_nothing_on_the_host_and_runs_on_any_device(name: str) -> None:
    args = arguments(name)
    with no_host_sync():
        SPECIFICATIONS[name](*args)
    on_meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in args)
    result = trace_on_meta(SPECIFICATIONS[name], *on_meta)
    traced = result if isinstance(result, tuple) else () if result is None else (result,)
    made = outputs(name, SPECIFICATIONS[name], args)[name in STORES :]
    assert [(t.shape, t.dtype) for t in traced] == [(t.shape, t.dtype) for t in made]


@EVERY_OP
def test_a_row_alone_gives_the_bytes_and_the_numbers_that_it_gives_in_a_batch(name: str) -> None:
    args = arguments(name, Sizes(5, 3, 2, torch.float64))
    split = [isinstance(a, Tensor) and a.dim() > 0 and a.shape[0] == 5 for a in args]
    for body in (SPECIFICATIONS[name], registered(name)):
        together = outputs(name, body, args)
        for b in range(5):
            alone = [a[b : b + 1] if per_row else a for a, per_row in zip(args, split, strict=True)]
            found = outputs(name, body, tuple(alone))
            if name in STORES:
                slots = args[WHERE.get(name, -1)][b].flatten()
                slots = slots[slots >= PAGE] - PAGE
                assert torch.equal(poisoned(found[0], slots), poisoned(together[0], slots))
            for one, all_ in zip(found[name in STORES :], together[name in STORES :], strict=True):
                assert_close(one[0], all_[b])


@pytest.mark.parametrize("name", STORES)
def test_a_store_changes_the_rows_that_it_names_alone(name: str) -> None:
    args = arguments(name, Sizes(3, 4))
    (cache, *_) = outputs(name, registered(name), args)
    slots = args[WHERE.get(name, -1)].flatten()
    slots = slots[slots >= PAGE].unique() - PAGE
    assert len(slots)
    assert torch.equal(cache, poisoned(cache, slots))
    assert numbers(cache)[slots].isfinite().all()


@pytest.mark.parametrize("kind", ["latents", "index", "keys"])
def test_a_row_that_is_read_and_stored_again_keeps_its_numbers(kind: str) -> None:
    cache, size = filled(kind, 3, 5), {"latents": RANK + ROPE, "index": DIM, "keys": KEY}[kind]
    given = spread(draw(3, 5, PAGE, size)).view(-1, size).double()
    found = numbers(cache)
    tile = {"latents": 128, "index": 128, "keys": 64}[kind]
    limit = given.abs().unflatten(-1, (-1, 64)).amax(-1)
    if tile == 128:  # the last half tile of a latent is its rotated part
        even = limit[:, : limit.shape[1] // 2 * 2].unflatten(-1, (-1, 2)).amax(-1)
        limit[:, : limit.shape[1] // 2 * 2] = even.repeat_interleave(2, -1)
    bound = torch.maximum(given.abs() * 2**-4, limit.repeat_interleave(64, -1) * 2**-9)
    assert ((found - given).abs() <= bound).all()


def test_codes_and_scales_of_a_tile_are_the_documented_ones() -> None:
    values = torch.tensor([[448.0, -224.0, 1.0, 0.0], [0.0] * 4, [-7.0, 0.015625, 3.5, 1e-30]])
    codes, scale = quantise_tiles(values, 4)
    assert scale.flatten().tolist() == [1.0, 1.0, 7.0 / 448.0]
    assert torch.equal(dequantise_tiles(codes, scale, torch.float32)[0], values[0])
    codes, power = quantise_powers(values, 4)
    assert decode_e8m0(power).flatten().tolist() == [1.0, 2.0**-126, 2.0**-6]
    assert codes[1].eq(0).all()


@pytest.mark.parametrize("quantise", [quantise_tiles, quantise_powers])
def test_nan_and_infinity_are_not_stored_as_numbers(quantise: Any) -> None:
    values = draw(1, 3, 64)
    values[1, 5], values[2, 7] = float("nan"), float("inf")
    codes, scale = quantise(values, 64)
    factors = scale if scale.is_floating_point() else decode_e8m0(scale)
    read = dequantise_tiles(codes, factors, torch.float32)
    assert read[0].isfinite().all()
    assert not read[1, 5].isfinite()
    assert not read[2, 7].isfinite()


def test_reads_do_not_touch_rows_that_nobody_names() -> None:
    for name, first in (("fp8_sparse_mla", 1), ("fp8_window_attention", 1)):
        args = arguments(name, Sizes(3, 4))
        slots = args[first + 1]
        clean = poisoned(args[first], slots[slots >= 0].unique().long())
        dirty = (*args[:first], clean, *args[first + 1 :])
        for body in (SPECIFICATIONS[name], registered(name)):
            assert torch.equal(body(*dirty), body(*args))


def test_layouts_are_those_of_the_field() -> None:
    latents, index, keys = filled("latents", 1, 2), filled("index", 1, 2), filled("keys", 1, 2)
    slot, page, row = torch.tensor([6]), 1, 2
    raw = latents[page].flatten()[row * 656 : (row + 1) * 656]
    values = raw[:512].view(torch.float8_e4m3fn).double().view(4, 128)
    scaled = (values * raw[512:528].view(torch.float32).double()[:, None]).flatten()
    turned = raw[528:].view(torch.bfloat16).double()
    assert torch.equal(
        torch.cat((scaled, turned))[None], read_latents(latents, slot, RANK, torch.float64)
    )
    raw = index[page].flatten()
    values = raw[row * 128 : (row + 1) * 128].view(torch.float8_e4m3fn).double()
    scale = raw[PAGE * 128 + row * 4 :][:4].view(torch.float32).double()
    found = read_index_pages(index, torch.tensor([page]), torch.float64)[0, row]
    assert torch.equal(values * scale, found)
    raw = keys[page].flatten()
    own = raw[row * 576 : (row + 1) * 576]
    values = own[:448].view(torch.float8_e4m3fn).double().view(7, 64)
    powers = raw[PAGE * 576 + row * 8 :][:8]
    scaled = (values * torch.exp2(powers[:7].double() - 127)[:, None]).flatten()
    turned = own[448:].view(torch.bfloat16).double()
    assert powers[7] == 0
    assert torch.equal(
        torch.cat((scaled, turned))[None], read_keys(keys, slot, KEY, ROPE, torch.float64)
    )
