# SPDX-License-Identifier: Apache-2.0
"""Stores write the right values to their own slots and to no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freewheel import ops
from freewheel.ops.dense import normalise_layer, normalise_rms, rotate
from tests.ops.cases import (
    WIDE_DTYPES,
    Body,
    Sizes,
    arguments,
    assert_close,
    bodies,
    draw,
    ints,
    rope_angles,
)

STORES = ("store_latent", "store_index_key")
RANK, ROPE, INDEX = 16, 8, 24
BODIES = {
    "specification": {name: ops.SPECIFICATIONS[name] for name in (*STORES, "sparse_mla")},
    "cpu": {name: ops.IMPLEMENTATIONS[name, "cpu"] for name in (*STORES, "sparse_mla")},
}
EVERY_STORE = pytest.mark.parametrize(
    "body",
    [pytest.param(BODIES[k][name], id=f"{name}-{k}") for k in BODIES for name in STORES],
)


def store(body: Body, cache: Tensor, x: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Call either store: x [B, W, 24] into cache [n_pages, page_size, 24]."""
    table, weight = rope_angles(64, ROPE), torch.ones(24, dtype=x.dtype)
    if body.__name__ == "store_latent":
        body(cache, x, weight[:RANK], 1e-6, positions, table, True, slots)
    else:
        body(cache, x, weight, weight, 1e-6, positions, table, False, slots)


@bodies("store_latent")
@pytest.mark.parametrize("dtype", WIDE_DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_latent_is_its_norm_then_its_rotated_key(
    body: Body, dtype: torch.dtype, interleaved: bool
) -> None:
    cache, x, norm, eps, positions, table, _, slots = arguments("store_latent", Sizes(dtype=dtype))
    body(cache, x, norm, eps, positions, table, interleaved, slots)
    stored = cache.view(-1, 24)[slots]
    assert_close(stored[..., :RANK], normalise_rms(x[..., :RANK], norm, eps))
    angles = table[positions.long()]
    assert_close(stored[..., RANK:], rotate(x[..., RANK:], angles, interleaved))


@bodies("store_index_key")
@pytest.mark.parametrize("dtype", WIDE_DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_an_index_key_is_normed_and_rotated_in_front(
    body: Body, dtype: torch.dtype, interleaved: bool
) -> None:
    args = arguments("store_index_key", Sizes(dtype=dtype))
    cache, x, weight, bias, eps, positions, table, _, slots = args
    body(cache, x, weight, bias, eps, positions, table, interleaved, slots)
    stored = cache.view(-1, 24)[slots]
    normed = normalise_layer(x, weight, bias, eps)
    assert_close(stored[..., ROPE:], normed[..., ROPE:])
    angles = table[positions.long()]
    assert_close(stored[..., :ROPE], rotate(normed[..., :ROPE], angles, interleaved))


@EVERY_STORE
def test_only_the_named_slots_change(body: Body) -> None:
    """The first and the last slot of the pool among the others."""
    cache = torch.arange(10 * 4 * 24, dtype=torch.float32).view(10, 4, 24)
    before = cache.view(-1, 24).clone()
    slots = torch.tensor([[7, 30, 12], [38, 1, 2]])
    store(body, cache, draw(1, 2, 3, 24), ints(0, 1, 2, 5, 6, 7).view(2, 3), slots)
    touched = torch.zeros(40, dtype=torch.bool)
    touched[slots.flatten()] = True
    after = cache.view(-1, 24)
    assert torch.equal(after[~touched], before[~touched])
    assert after[touched].ne(before[touched]).any(-1).all()


@EVERY_STORE
def test_padding_queries_full_of_nan_reach_scratch_and_nothing_else(body: Body) -> None:
    cache = torch.arange(10 * 4 * 24, dtype=torch.float32).view(10, 4, 24)
    before = cache.view(-1, 24).clone()
    x = draw(1, 2, 4, 24)
    x[:, 2:] = float("nan")
    slots = torch.tensor([[8, 9, 0, 0], [20, 21, 0, 0]])
    store(body, cache, x, ints(4, 5, 0, 0).expand(2, 4), slots)
    after = cache.view(-1, 24)
    assert after[[8, 9, 20, 21]].isfinite().all()
    untouched = [s for s in range(1, 40) if s not in (8, 9, 20, 21)]
    assert torch.equal(after[untouched], before[untouched])


@EVERY_STORE
def test_storing_again_changes_nothing(body: Body) -> None:
    """A rejected draft's slot is overwritten by what a plain run would have put there."""
    x, positions, slots = draw(1, 1, 3, 24), ints(4, 5, 6)[None], torch.tensor([[8, 9, 10]])
    once = torch.zeros(10, 4, 24)
    store(body, once, x, positions, slots)
    twice = torch.zeros(10, 4, 24)
    store(body, twice, draw(2, 1, 3, 24), positions, slots)
    store(body, twice, x, positions, slots)
    assert torch.equal(once, twice)


@EVERY_STORE
@pytest.mark.parametrize("size", [4, 8, 12])
def test_what_is_written_by_position_is_read_back_by_position(body: Body, size: int) -> None:
    """For pages of any size and in any order, in one step and one by one."""
    length, table = 3 * size, torch.tensor([3, 1, 2])
    places = torch.arange(length)
    slots = (table[places // size] * size + places % size)[None]
    x, positions = draw(1, 1, length, 24, dtype=torch.float64), places.int()[None]
    at_once = torch.zeros(4, size, 24, dtype=torch.float64)
    store(body, at_once, x, positions, slots)
    assert at_once.view(-1, 24).ne(0).any(-1).sum() == length
    singly = torch.zeros_like(at_once)
    for t in reversed(range(length)):
        now = slice(t, t + 1)
        store(body, singly, x[:, now], positions[:, now], slots[:, now])
    assert_close(singly, at_once)


@EVERY_STORE
def test_a_bfloat16_cache_holds_the_rounded_float32_value(body: Body) -> None:
    x, positions, slots = draw(1, 1, 3, 24), ints(4, 5, 6)[None], torch.tensor([[8, 9, 10]])
    wide, narrow = torch.zeros(10, 4, 24), torch.zeros(10, 4, 24, dtype=torch.bfloat16)
    store(body, wide, x, positions, slots)
    store(body, narrow, x, positions, slots)
    assert torch.equal(narrow, wide.bfloat16())


@pytest.fixture
def large_cache(tmp_path: Path) -> Iterator[Tensor]:
    """bfloat16 [3300, 1280, 512]; its file takes up only what is written. Offsets pass 2^31."""
    shape = (3300, 1280, 512)
    path = tmp_path / "cache"
    with path.open("wb") as file:
        file.truncate(2 * shape[0] * shape[1] * shape[2])
    yield torch.from_file(
        str(path), shared=True, size=shape[0] * shape[1] * shape[2], dtype=torch.bfloat16
    ).view(shape)
    path.unlink()


@pytest.mark.parametrize("kind", sorted(BODIES))
def test_addresses_beyond_31_bits_are_exact(large_cache: Tensor, kind: str) -> None:
    """Page 3277 of 1280 rows of 512 elements is the first whose offset overflows."""
    store_latent, sparse_mla = BODIES[kind]["store_latent"], BODIES[kind]["sparse_mla"]
    slots = torch.tensor([[1280, 3277 * 1280 + 5, 3300 * 1280 - 1]])
    assert int(slots[0, 1]) * 512 > 2**31
    small, near = torch.zeros(1, 3, 512, dtype=torch.bfloat16), torch.arange(3)[None]
    x, table = draw(1, 1, 3, 512).bfloat16(), rope_angles(8, 64)
    for cache, where in ((large_cache, slots), (small, near)):
        store_latent(cache, x, torch.ones(448), 1e-6, ints(1, 2, 3)[None], table, True, where)
    assert torch.equal(large_cache.view(-1, 512)[slots[0]], small[0])
    query = draw(2, 1, 1, 2, 512).bfloat16()
    far = sparse_mla(query, large_cache, slots[None].int(), 0.1, 448)
    assert torch.equal(far, sparse_mla(query, small, near[None].int(), 0.1, 448))
