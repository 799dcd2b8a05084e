# SPDX-License-Identifier: Apache-2.0
"""Calls of single ops at real dimensions, the bytes and operations they need, and their error.

Dimensions are those of DeepSeek-V3.2: 64 index heads of 128, latents of 512 + 64, top-k 2048.
`heads` 16 is one rank's share of eight, 128 the whole. Caches are bfloat16, or FP8 where an op's
name says so, in pages of 64 tokens, rows' pages in random order. Several sets of inputs are used in
turn, so that together they exceed what the L2 cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freewheel import ops
from freewheel.ops.rows import write_index_keys

PAGE, TOP_K = 64, 2048
INDEX_HEADS, INDEX_DIM = 64, 128
RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
SCALE = (NOPE + ROPE) ** -0.5

ROTATED, MOST_SETS = 120_000_000, 8
"""Bytes that the sets should reach together (twice the L2 of an H200), and the most sets."""

BANDWIDTH, BF16_RATE = 4.25e12, 790e12
"""Bytes and operations a second that an H200 reaches in a large copy and a large product.

In FP8 twice as many operations.
"""

INDEX_LOGITS = ("index_logits", "fp8_index_logits")


@dataclass(frozen=True)
class Cell:
    """One op at one size. `context`: keys of every row; `heads`: of attention."""

    op: str
    batch: int
    width: int
    context: int = 0
    heads: int = 16

    @property
    def tokens(self) -> int:
        return self.batch * self.width

    @property
    def name(self) -> str:
        context = f" {self.context // 1024}k" if self.context else ""
        heads = f" h{self.heads}" if self.op not in (*INDEX_LOGITS, "topk_slots") else ""
        return f"b{self.batch} q{self.width}{context}{heads}"

    @property
    def floor_us(self) -> float:
        """The longer of: bytes read and written once, over `BANDWIDTH`; products over `BF16_RATE`.

        The keys that a query attends to count for that query alone, as peers count them.
        """
        rate = 2 * BF16_RATE if self.op.startswith("fp8") else BF16_RATE
        return 1e6 * max(self._bytes() / BANDWIDTH, self._operations() / rate)

    def _bytes(self) -> int:
        scores = 4 * self.tokens * self.context
        if self.op in INDEX_LOGITS:
            row = INDEX_DIM + 4 if self.op.startswith("fp8") else 2 * INDEX_DIM
            return self.batch * self.context * row + scores
        if self.op == "topk_slots":
            return scores + 4 * self.tokens * TOP_K
        per_head = {"sparse_mla": RANK + ROPE + RANK, "absorb_query": NOPE + RANK + 2 * ROPE}
        ends = 2 * self.tokens * self.heads * per_head.get(self.op, RANK + VALUE)
        if self.op == "sparse_mla":
            return ends + 2 * self.tokens * min(TOP_K, self.context) * (RANK + ROPE)
        return ends + 2 * self.heads * RANK * VALUE

    def _operations(self) -> int:
        if self.op in INDEX_LOGITS:
            return 2 * self.tokens * self.context * INDEX_HEADS * INDEX_DIM
        if self.op == "topk_slots":
            return 0
        each = 2 * self.tokens * self.heads
        if self.op == "sparse_mla":
            return each * min(TOP_K, self.context) * (2 * RANK + ROPE)
        return each * RANK * VALUE


def _cells() -> tuple[Cell, ...]:
    logits = [(1, 1, 4), (8, 1, 32), (8, 2, 32), (8, 4, 32), (8, 6, 32), (32, 4, 4), (8, 4, 128)]
    packed = [*logits[:-1], (8, 8, 32), (8, 1, 128), (8, 4, 128), (32, 1, 128)]
    topk = [(1, 1, 4), (8, 4, 4), (32, 4, 4), (8, 1, 32), (32, 1, 32), (128, 1, 32)]
    topk += [(1, 1, 128), (8, 1, 128), (32, 1, 128)]
    return (
        *(Cell("index_logits", b, w, k << 10) for b, w, k in logits),
        *(Cell("fp8_index_logits", b, w, k << 10) for b, w, k in packed),
        *(Cell("topk_slots", b, w, k << 10) for b, w, k in topk),
        *(Cell("sparse_mla", b, 4, 4096, h) for h in (8, 16) for b in (1, 8, 32)),
        *(Cell("sparse_mla", b, w, 32768, 128) for b, w in ((8, 1), (8, 4), (32, 4))),
        *(Cell(op, b, 4) for op in ("absorb_query", "expand_values") for b in (1, 8, 32)),
    )


CELLS = _cells()
"""What is measured unless a few ops or one size are asked for."""

QUICK = tuple({cell.op: cell for cell in reversed(CELLS) if cell.context <= 4096}.values())[::-1]
"""The smallest cell of each op."""


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
        batched = dict.fromkeys(INDEX_LOGITS, (0, 1, 4, 5))
        batched |= {"topk_slots": (0, 2, 3), "sparse_mla": (0, 2)}
        for index in batched.get(cell.op, (0,)):
            args[index] = args[index][:1]
        if cell.op == "absorb_query":
            args[2] = args[2][:1]
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
    every = torch.arange(packed.shape[0] * PAGE, device=device).view(-1, PAGE)
    write_index_keys(packed, keys, every)
    return query, gates, packed, *rest


def _draw_topk_slots(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    logits = torch.randn(cell.batch, cell.width, cell.context, device=device)
    return logits, *_rows(cell, device), PAGE, TOP_K


def _draw_sparse_mla(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    slots = ops.topk_slots(*_draw_topk_slots(cell, device))
    pages = cell.batch * cell.context // PAGE + 1
    latent = _normal(device, pages, PAGE, RANK + ROPE) / 10
    query = _normal(device, cell.batch, cell.width, cell.heads, RANK + ROPE)
    return query, latent, slots, SCALE, RANK


def _draw_absorb_query(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    query = _normal(device, cell.batch, cell.width, cell.heads, NOPE + ROPE)
    positions = torch.randint(0, 4096, (cell.batch, cell.width), device=device).int()
    table = torch.randn(4096, ROPE, device=device)
    return query, _normal(device, cell.heads, NOPE, RANK), positions, table, True


def _draw_expand_values(cell: Cell, device: torch.device) -> tuple[Any, ...]:
    mixed = _normal(device, cell.batch, cell.width, cell.heads, RANK)
    return mixed, _normal(device, cell.heads, RANK, VALUE)


_DRAWERS = {
    "index_logits": _draw_index_logits,
    "fp8_index_logits": _draw_fp8_index_logits,
    "topk_slots": _draw_topk_slots,
    "sparse_mla": _draw_sparse_mla,
    "absorb_query": _draw_absorb_query,
    "expand_values": _draw_expand_values,
}
