# SPDX-License-Identifier: Apache-2.0
"""Which keys one query of each row picks: noted layer by layer while a forward runs."""

from __future__ import annotations

import torch
from torch import Tensor


class Picks:
    """In the order of the layers that pick. Part of the graph in which the forward is captured."""

    def __init__(self, rows: Tensor, given: Tensor) -> None:
        """rows, given: int32 [B]; of a rectangle's `given` certain tokens the last one asks."""
        self._rows, self._query = rows, (given.long() - 1).clamp(min=0)
        self._found: list[Tensor] = []

    def note(self, slots: Tensor, lens: Tensor, table: Tensor, page_rows: int) -> None:
        """A layer's: slots int32 [B, W, K], -1 padded, of the first lens int32 [B, W] keys of rows
        whose pages table int32 [R, P] names."""
        own = slots.gather(1, self._query.view(-1, 1, 1).expand(-1, 1, slots.shape[2]))[:, 0]
        seen = lens.gather(1, self._query[:, None])  # int32 [B, 1]
        pages = table.index_select(0, self._rows)  # int32 [B, P]
        self._found.append(places_of(own, seen, pages, page_rows))

    def words(self) -> Tensor:
        """int32 [B, layers * K]: numbers of keys, ascending, -1 padded."""
        return torch.cat(self._found, dim=1) if self._found else self._rows.new_empty(1, 0)


def places_of(slots: Tensor, lens: Tensor, pages: Tensor, page_rows: int) -> Tensor:
    """int32 [B, K]: the keys that slots int32 [B, K] hold, by their numbers; -1 where negative.

    pages int32 [B, P]: of each row, in order; lens int32 [B, 1]: its keys. What a page behind them
    was for says nothing of this row.
    """
    first = torch.arange(pages.shape[1], device=pages.device, dtype=torch.int32) * page_rows
    named = pages.masked_fill(first >= lens, -1)  # int32 [B, P]
    ascending, column = named.sort(dim=1)
    page = slots.clamp(min=0) // page_rows
    at = torch.searchsorted(ascending, page).clamp(max=pages.shape[1] - 1)
    number = column.gather(1, at).int() * page_rows + slots % page_rows
    return number.masked_fill(slots < 0, -1)
