# SPDX-License-Identifier: Apache-2.0
"""Runs a model over paged caches by hand: random page order, NaN in every page not yet written."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from freewheel import ops
from freewheel.models import DraftHead, LoadedModel, Model
from freewheel.spec.storage import RowStorage
from freewheel.state import Arena, CachePool, StepView

ROW = 2
"""The row under test; row 1 belongs to a neighbour, row 0 is scratch."""

NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class Paged:
    """One row of at most `length` tokens, and a neighbour that keeps the batch at two rows."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        length: int = 64,
        page_size: int = 4,
        seed: int = 0,
        storage: RowStorage | None = None,
    ) -> None:
        self.model: Model = loaded.model
        self.draft_head: DraftHead | None = loaded.draft_head
        dtype = NAMES[loaded.weights[0].dtype]
        groups = self.model.cache_groups(page_size, dtype, storage)
        self.columns = tuple(group.pages_for(length) for group in groups)
        arena = Arena("cpu")
        self.cache = CachePool(arena, groups, tuple(2 * columns + 3 for columns in self.columns))
        for stored in arena.tensors():
            stored.fill_(float("nan") if stored.is_floating_point() else 255)
        self.page_sizes = tuple(group.page_size for group in groups)
        self.page_tables = torch.zeros(len(groups), 3, max(self.columns), dtype=torch.int32)
        for table, columns in zip(self.page_tables, self.columns, strict=True):
            order = random.Random(seed).sample(range(1, 2 * columns + 3), 2 * columns)
            table[1:, :columns] = torch.tensor(order, dtype=torch.int32).view(2, columns)
        self.tokens = torch.full((3, length), 7, dtype=torch.int32)

    def view(self, tokens: Sequence[int], start: int, width: int, shift: int = 0) -> StepView:
        """A rectangle of two rows: `tokens` at `start` of the row, one token of the neighbour."""
        given = torch.tensor(tokens, dtype=torch.int32)
        self.tokens[ROW, start + shift : start + shift + len(tokens)] = given
        rows = torch.tensor([1, ROW], dtype=torch.int32)
        starts = torch.tensor([0, start], dtype=torch.int32)
        lens = torch.tensor([1, len(tokens)], dtype=torch.int32)
        opened = ops.open_step(
            self.tokens, self.page_tables, rows, starts, lens, width, shift, self.page_sizes
        )
        return StepView(rows, *opened, self.page_tables, self.columns)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], start: int = 0, padding: int = 2) -> Tensor:
        """Hidden states [len(tokens), H] of `tokens` at `start`, from one padded rectangle."""
        view = self.view(tokens, start, len(tokens) + padding)
        return self.model.forward(view, self.cache)[1, : len(tokens)]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Logits [len(tokens), V], the tokens fed in `chunks` in turn, the last size repeated."""
        return self.model.logits(self.hidden(tokens, chunks))

    def hidden(self, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Hidden states [len(tokens), H], fed as in `logits`."""
        parts: list[Tensor] = []
        start, sizes = 0, list(chunks)
        while start < len(tokens):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            parts.append(self.forward(tokens[start : start + size], start))
            start += size
        return torch.cat(parts)

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], start: int, hidden: Tensor) -> Tensor:
        """The draft head's states [len(tokens), H] at positions from `start` on.

        `tokens` are those one position further on; hidden [len(tokens), H].
        """
        assert self.draft_head is not None
        view = self.view(tokens, start, len(tokens), shift=1)
        neighbour = torch.zeros_like(hidden)
        return self.draft_head.forward(view, self.cache, torch.stack((neighbour, hidden)))[1]
