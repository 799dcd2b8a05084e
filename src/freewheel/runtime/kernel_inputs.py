# SPDX-License-Identifier: Apache-2.0
"""Random inputs of single ops at real dimensions, and the error of what an op makes of them.

Caches are bfloat16, or FP8 where an op's name says so, in pages of 64 tokens, rows' pages in random
order. Several sets of inputs are used in turn, so that together they exceed what the L2 cache
holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freewheel import ops
from freewheel.ops.rows import write_index_keys, write_keys, write_latents
from freewheel.runtime.kernel_cells import (
    ENTRIES,
    INDEX_DIM,
    INDEX_HEADS,
    INDEX_LOGITS,
    KEY_DIM,
    LATENT_ATTENTION,
    NOPE,
    PACKED_KEY,
    PACKED_LATENT,
    PAGE,
    RANK,
    ROPE,
    TOP_K,
    VALUE,
    VOCABULARY,
    WINDOW,
    WINDOW_ATTENTION,
    Cell,
)  # fmt: skip
from freewheel.spec.sampling import MAX_STOP_IDS

SCALE = (NOPE + ROPE) ** -0.5

LIMIT = 10.0
"""At which V4-Flash clamps what its experts multiply (`swiglu_limit`)."""

ROTATED, MOST_SETS = 120_000_000, 8
"""Bytes that the sets should reach together (twice the L2 of an H200), and the most sets."""

BATCHED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(INDEX_LOGITS, (0, 1, 4, 5)),
    "topk_slots": (0, 2, 3),
    **dict.fromkeys(LATENT_ATTENTION, (0, 2)),
    **dict.fromkeys(WINDOW_ATTENTION, (0, 2, 4, 7)),
    "absorb_query": (0, 2),
    **dict.fromkeys(("block_experts", "mxfp4_experts"), (0, 5, 6)),
    "repacked_experts": (0, 3, 4),
    "choose": (0, 1, 2),
}
"""Op -> its arguments whose first dimension is the batch's; (0,) of others."""


@dataclass(frozen=True)
class Inputs:
    """One set: what the op takes, positionally, and what peers need besides."""

    cell: Cell
    args: tuple[Any, ...]

    def call(self) -> Tensor:
        return getattr(ops, self.cell.op)(*self.args)

    def error(self, found: Tensor) -> float:
        """Of the first row of the batch, against the specification in float32 on the same values.

        The norm of the difference over the norm; of picks, how many differ.
        """
        cell = self.cell
        args = list(self.args)
        for index in BATCHED.get(cell.op, (0,)):
            args[index] = args[index][:1]
        expected = ops.SPECIFICATIONS[cell.op](*args)
        found = found[: len(expected)]
        if not found.is_floating_point():
            return float((found != expected).sum())
        live = expected.isfinite()
        wanted = expected[live].double()
        return float((found[live].double() - wanted).norm() / wanted.norm())


def draw_sets(cell: Cell, device: torch.device) -> list[Inputs]:
    """Sets of random inputs, as many as it takes to overflow the cache."""
    first = Inputs(cell, _DRAWERS[cell.op](cell, device))
    size = sum(arg.numel() * arg.element_size() for arg in first.args if isinstance(arg, Tensor))
    count = max(2, min(MOST_SETS, ROTATED // size + 1))
    return [first, *(Inputs(cell, _DRAWERS[cell.op](cell, device)) for _ in range(count - 1))]


def _rows(cell: Cell, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(page table, rows, kv_lens): the last query of a row sees all of its context."""
    columns = cell.context // PAGE
    order = torch.randperm(cell.batch * columns, device=device) + 1
    table = torch.zeros(cell.batch + 1, columns, dtype=torch.int32, device=device)
    table[1:] = order.view(cell.batch, columns).int()
    rows = torch.arange(1, cell.batch + 1, dtype=torch.int32, device=device)
    lens = cell.context - cell.width + 1 + torch.arange(cell.width, device=device)
    return table, rows, lens.int().expand(cell.batch, cell.width).contiguous()


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _draw_index_logits(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    table, rows, lens = _rows(cell, device)
    lead = cell.batch, cell.width, INDEX_HEADS
    gates = torch.randn(lead, device=device)
    keys = _normal(device, int(table.max()) + 1, PAGE, INDEX_DIM)
    return _normal(device, *lead, INDEX_DIM), gates, keys, table, rows, lens, TOP_K


def _draw_fp8_index_logits(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    query, gates, keys, *rest = _draw_index_logits(cell, device)
    packed = torch.empty(*keys.shape[:2], INDEX_DIM + 4, dtype=torch.uint8, device=device)
    write_index_keys(packed, keys, _every_slot(packed))
    return query, gates, packed, *rest


def _draw_topk_slots(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    logits = torch.randn(cell.batch, cell.width, cell.context, device=device)
    return logits, *_rows(cell, device), PAGE, TOP_K


def _every_slot(cache: Tensor) -> Tensor:
    """int64 [n_pages, page_size]"""
    pages, size = cache.shape[:2]
    return torch.arange(pages * size, device=cache.device).view(pages, size)


def _draw_sparse_mla(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    slots = ops.topk_slots(*_draw_topk_slots(cell, device))
    pages = cell.batch * cell.context // PAGE + 1
    latent = _normal(device, pages, PAGE, RANK + ROPE) / 10
    query = _normal(device, cell.batch, cell.width, cell.heads, RANK + ROPE)
    return query, latent, slots, SCALE, RANK


def _draw_fp8_sparse_mla(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    query, latent, *rest = _draw_sparse_mla(cell, device)
    packed = torch.zeros(*latent.shape[:2], PACKED_LATENT, dtype=torch.uint8, device=device)
    write_latents(packed, latent, _every_slot(packed), ROPE)
    return query, packed, *rest


def _draw_window_attention(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    """Both caches hold 65,536 rows, windows on pages of 256 and entries on pages of 64."""
    query = _normal(device, cell.batch, cell.width, cell.heads, KEY_DIM)
    keys = _normal(device, 256, 256, KEY_DIM) / 10
    entries = _normal(device, 1024, 64, KEY_DIM) / 10
    slots, entry_slots = (
        torch.rand(cell.batch, cell.width, 1 << 16, device=device).topk(lanes).indices.int()
        for lanes in (WINDOW, ENTRIES)
    )
    sinks, table = torch.randn(cell.heads, device=device), torch.randn(4096, ROPE, device=device)
    positions = torch.randint(0, 4096, (cell.batch, cell.width), device=device).int()
    return query, keys, slots, entries, entry_slots, sinks, KEY_DIM**-0.5, positions, table


def _draw_fp8_window_attention(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    query, keys, slots, entries, *rest = _draw_window_attention(cell, device)
    packed: list[Tensor] = []
    for cache in (keys, entries):
        packed.append(torch.zeros(*cache.shape[:2], PACKED_KEY, dtype=torch.uint8, device=device))
        write_keys(packed[-1], cache, _every_slot(cache), ROPE)
    return query, packed[0], slots, packed[1], *rest


def _draw_absorb_query(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    query = _normal(device, cell.batch, cell.width, cell.heads, NOPE + ROPE)
    positions = torch.randint(0, 4096, (cell.batch, cell.width), device=device).int()
    table = torch.randn(4096, ROPE, device=device)
    return query, _normal(device, cell.heads, NOPE, RANK), positions, table, True


def _draw_expand_values(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    mixed = _normal(device, cell.batch, cell.width, cell.heads, RANK)
    return mixed, _normal(device, cell.heads, RANK, VALUE)


def _fp8(device: torch.device, *shape: int) -> tuple[Tensor, Tensor]:
    """(values, scale of each block of 128 x 128), so that a product of normal inputs is normal."""
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for one in values.view(-1, *shape[-2:]):  # one at a time: all of them once more are gigabytes
        one.copy_(torch.randn(shape[-2:], dtype=torch.bfloat16, device=device))
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return values, (0.5 + torch.rand(grid, device=device)) / shape[-1] ** 0.5


def _draw_block_linear(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    return _normal(device, cell.batch, cell.width, cell.dims[1]), *_fp8(device, *cell.dims)


def _choices(cell: Cell, device: torch.device) -> tuple[Tensor, Tensor]:
    """(experts int32 [B, W, k], weights float32 [B, W, k]), every set of experts equally likely."""
    experts, chosen = cell.dims[2:]
    scores = torch.rand(cell.batch, cell.width, experts, device=device)
    return scores.argsort(-1)[..., :chosen].int(), torch.rand(
        cell.batch, cell.width, chosen, device=device
    )


def _draw_block_experts(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    hidden, width, experts, _ = cell.dims
    x = _normal(device, cell.batch, cell.width, hidden)
    weights = (*_fp8(device, experts, 2 * width, hidden), *_fp8(device, experts, hidden, width))
    return x, *weights, *_choices(cell, device)


def _mxfp4(device: torch.device, *shape: int) -> tuple[Tensor, Tensor]:
    """(two values a byte, scales 2^-6 to 2^-4 of groups of 32)"""
    packed = torch.randint(256, (*shape[:-1], shape[-1] // 2), device=device, dtype=torch.uint8)
    scale = torch.randint(121, 124, (*shape[:-1], shape[-1] // 32), device=device)
    return packed, scale.to(torch.uint8)


def _draw_mxfp4_experts(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    hidden, width, experts, _ = cell.dims
    x = _normal(device, cell.batch, cell.width, hidden)
    weights = (
        *_mxfp4(device, experts, 2 * width, hidden),
        *_mxfp4(device, experts, hidden, width),
    )
    return x, *weights, *_choices(cell, device), LIMIT


def _draw_repacked_experts(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    x, up, up_scale, low, low_scale, *rest = _draw_mxfp4_experts(cell, device)
    return x, ops.repack_mxfp4(up, up_scale, True), ops.repack_mxfp4(low, low_scale, False), *rest


def _draw_choose(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    """All rows sample, each with every filter."""
    logits = 3 * torch.randn(cell.batch, cell.width, VOCABULARY, device=device)
    positions = torch.randint(0, 4096, (cell.batch, cell.width), device=device).int()
    rows = torch.arange(1, cell.batch + 1, dtype=torch.int32, device=device)

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((cell.batch + 1,), value, dtype=dtype, device=device)

    filters = column(0.8), column(50, torch.int32), column(0.95), column(0.02)
    seeds = torch.arange(cell.batch + 1, device=device)
    stops = torch.full((cell.batch + 1, MAX_STOP_IDS), -1, dtype=torch.int32, device=device)
    return logits, positions, rows, *filters, seeds, stops, column(0, torch.int32)


_DRAWERS = {
    "index_logits": _draw_index_logits,
    "fp8_index_logits": _draw_fp8_index_logits,
    "topk_slots": _draw_topk_slots,
    "sparse_mla": _draw_sparse_mla,
    "fp8_sparse_mla": _draw_fp8_sparse_mla,
    "window_attention": _draw_window_attention,
    "fp8_window_attention": _draw_fp8_window_attention,
    "absorb_query": _draw_absorb_query,
    "expand_values": _draw_expand_values,
    "block_linear": _draw_block_linear,
    "block_experts": _draw_block_experts,
    "mxfp4_experts": _draw_mxfp4_experts,
    "repacked_experts": _draw_repacked_experts,
    "choose": _draw_choose,
}
