# SPDX-License-Identifier: Apache-2.0
"""Small inputs for the ops of attention, caches and dense layers, and what "equal" means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS

Body = Callable[..., Any]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Of the largest finite value of the expected tensor, or of 1 if that is larger."""

WIDE_DTYPES = (torch.float32, torch.float64)


def bodies(name: str) -> pytest.MarkDecorator:
    """Run a test with the specification of op `name` and with its CPU body."""
    both = [SPECIFICATIONS[name]]
    if (name, "cpu") in IMPLEMENTATIONS:
        both.append(IMPLEMENTATIONS[name, "cpu"])
    return pytest.mark.parametrize("body", both, ids=["specification", "cpu"][: len(both)])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype, integers and non-finite values; finite floats within the tolerance."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if not expected.is_floating_point():
        assert torch.equal(actual, expected)
        return
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    assert torch.equal(actual[expected.isinf()], expected[expected.isinf()])
    wanted = expected[finite].double()
    if wanted.numel():
        error = (actual[finite].double() - wanted).abs().max().item()
        limit = TOLERANCE[expected.dtype] * max(1.0, wanted.abs().max().item())
        assert error <= limit, f"off by {error:.3g}, {limit:.3g} allowed"


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Pages:
    """Rows of a paged cache: row 0 and page 0 are scratch, all other pages belong to one row."""

    table: Tensor  # int32 [R, P]
    rows: Tensor  # int32 [B]
    kv_lens: Tensor  # int32 [B, W]
    size: int

    @property
    def length(self) -> int:
        """S: positions that a row's pages hold."""
        return self.table.shape[1] * self.size

    @property
    def count(self) -> int:
        """Pages in the pool, scratch included."""
        return self.table.shape[0] * self.table.shape[1] + 1

    def slots_of(self, b: int, positions: Tensor) -> Tensor:
        """int64: slots of `positions` of batch row b."""
        page = self.table[self.rows[b].long()].long()[positions // self.size]
        return page * self.size + positions % self.size


def draw_pages(seed: int, batch: int, width: int, columns: int, size: int) -> Pages:
    """Distinct random pages, rows in random order, lengths 0 .. S."""
    chance = generator(seed)
    count = batch + 2
    table = torch.randperm(count * columns, generator=chance).view(count, columns).int() + 1
    table[0] = 0
    rows = torch.randperm(count - 1, generator=chance)[:batch].int() + 1
    shape = (batch, width)
    kv_lens = torch.randint(0, columns * size + 1, shape, generator=chance, dtype=torch.int32)
    return Pages(table, rows, kv_lens, size)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, the same ones in every dtype."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def draw_slots(seed: int, pages: Pages, k: int, width: int) -> Tensor:
    """int32 [B, W, k] of the rows' own slots, each lane dead with a chance of one in four."""
    chance = generator(seed)
    shape = (pages.rows.shape[0], width, k)
    positions = torch.randint(0, pages.length, shape, generator=chance)
    slots = torch.empty_like(positions)
    for b in range(shape[0]):
        slots[b] = pages.slots_of(b, positions[b])
    return slots.masked_fill(torch.rand(shape, generator=chance) < 0.25, -1).int()


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory, for sizes that no test can afford."""
    return torch.empty(shape, dtype=dtype, device="meta")


def rope_angles(count: int, dim: int, theta: float = 10000.0) -> Tensor:
    """float32 [count, dim] = (cos | sin), no scaling."""
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


@dataclass(frozen=True)
class Sizes:
    """Of one call of any op."""

    batch: int = 2
    width: int = 3
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def lead(self) -> tuple[int, int]:
        return self.batch, self.width

    @property
    def wide(self) -> torch.dtype:
        """In which scores and gates come."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def draw(self, nth: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return draw(100 * self.seed + nth, *shape, dtype=dtype or self.dtype)


def _attention(name: str, of: Sizes) -> tuple[Any, ...]:
    pages = draw_pages(of.seed, of.batch, of.width, columns=5, size=4)
    if name == "index_logits":
        keys = of.draw(3, pages.count, 4, 16)
        gates = of.draw(2, *of.lead, 3, dtype=of.wide)
        query = of.draw(1, *of.lead, 3, 16)
        return query, gates, keys, pages.table, pages.rows, pages.kv_lens
    if name == "topk_slots":
        logits = of.draw(4, *of.lead, pages.length, dtype=of.wide)
        return logits, pages.table, pages.rows, pages.kv_lens, 4, 6
    slots = draw_slots(of.seed, pages, 7, of.width)
    values = of.draw(7, 4, 16, 12) if name == "sparse_mla_values" else 16
    return of.draw(5, *of.lead, 4, 24), of.draw(6, pages.count, 4, 24), slots, 0.2, values


def _store(name: str, of: Sizes) -> tuple[Any, ...]:
    slots = torch.randperm(40, generator=generator(of.seed))[: of.batch * of.width].view(of.lead)
    positions = torch.randint(0, 50, of.lead, generator=generator(of.seed), dtype=torch.int32)
    cache, x, norm = of.draw(1, 10, 4, 24), of.draw(2, *of.lead, 24), of.draw(3, 24)
    table = rope_angles(50, 8)
    if name == "store_latent":
        return cache, x, norm[:16], 1e-6, positions, table, True, slots
    return cache, x, norm, norm.flip(0), 1e-6, positions, table, False, slots


def _latents(name: str, of: Sizes) -> tuple[Any, ...]:
    """Inputs that are slices of one projection's output, as the attention hands them over."""
    if name == "expand_values":
        return of.draw(1, *of.lead, 3, 16), of.draw(2, 3, 16, 12)
    cache, _, _, _, positions, table, interleaved, slots = _store("store_latent", of)
    place = (positions, table, interleaved, slots)
    norm, bias = of.draw(3, 40), of.draw(4, 24)
    one, two, three = of.draw(2, *of.lead, 136).split((40, 72, 24), dim=-1)
    if not of.batch:  # torch's own checks cannot copy an empty slice
        one, two, three = (x.new_empty(x.shape) for x in (one, two, three))
    if name == "absorb_query":
        return two[..., :60].unflatten(-1, (3, 20)), of.draw(5, 3, 12, 16), *place[:3]
    if name == "norm_latents":
        return cache, one, norm, three, norm[:16], 1e-6, *place
    gates = of.draw(6, *of.lead, 3, dtype=of.wide)
    query, key = two.unflatten(-1, (3, 24)), three
    placed = (cache, query, gates, 0.3, key, norm[:24], bias, 1e-6, *place)
    if name == "index_queries":
        return placed
    own = of.draw(7, *of.lead, 70)[..., 5:65].unflatten(-1, (3, 20))
    own = own if of.batch else own.new_empty(own.shape)
    return *placed, own, of.draw(8, 3, 12, 16), not interleaved


def _dense(name: str, of: Sizes) -> tuple[Any, ...]:
    x, weight = of.draw(1, *of.lead, 32), of.draw(2, 32)
    positions = torch.randint(0, 50, of.lead, generator=generator(of.seed), dtype=torch.int32)
    ids = torch.rand((*of.lead, 6), generator=generator(of.seed)).argsort(-1)[..., :2].int()
    experts = of.draw(3, 6, 16, 32), of.draw(4, 6, 32, 8)
    logits, bias = of.draw(5, *of.lead, 8, dtype=of.wide), of.draw(6, 8, dtype=of.wide)
    return {
        "rms_norm": (x, weight, 1e-6),
        "add_rms_norm": (x, x.flip(-1), weight, 1e-6),
        "layer_norm": (x, weight, weight.flip(0), 1e-6),
        "rope": (x.unflatten(-1, (2, 16)), positions, rope_angles(50, 8), 4, True),
        "route": (logits, bias, 4, 2, 3, True, 2.5),
        "silu_mul": (x,),
        "grouped_experts": (x, *experts, ids, of.draw(7, *of.lead, 2, dtype=of.wide)),
    }[name]


CASES: dict[str, Callable[[str, Sizes], tuple[Any, ...]]] = {
    **dict.fromkeys(("index_logits", "topk_slots", "sparse_mla", "sparse_mla_values"), _attention),
    **dict.fromkeys(("store_latent", "store_index_key"), _store),
    **dict.fromkeys(
        ("norm_latents", "index_queries", "absorb_query", "place_queries", "expand_values"),
        _latents,
    ),
    **dict.fromkeys(
        ("rms_norm", "add_rms_norm", "layer_norm", "rope", "route", "silu_mul", "grouped_experts"),
        _dense,
    ),
}
"""Arguments of one valid call of each op."""


def arguments(name: str, of: Sizes | None = None) -> tuple[Any, ...]:
    return CASES[name](name, of or Sizes())
