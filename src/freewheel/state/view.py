# SPDX-License-Identifier: Apache-2.0
"""What a forward may know about its rows: derived in the graph, nothing from the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel import ops
from freewheel.state.picks import Picks
from freewheel.state.sequence import SequenceState


@dataclass(frozen=True)
class StepView:
    """A rectangle of queries: B rows, W queries each, G page-table groups, R rows of state."""

    rows: Tensor  # int32 [B]
    tokens: Tensor  # int32 [B, W]
    positions: Tensor  # int32 [B, W]
    kv_lens: Tensor  # int32 [B, W]  causal bound of each query, itself included; 0 = padding
    write_slots: Tensor  # int64 [G, B, W]  scratch slot 0 where the query is padding
    page_tables: Tensor  # int32 [G, R, P]  the whole tables: kernels read them by row
    columns: tuple[int, ...] = ()
    picks: Picks | None = None  # where it is noted which keys are picked, if somebody asks

    def table(self, group: int) -> Tensor:
        """int32 [R, columns of the group]: its page table, without columns it never uses."""
        return self.page_tables[group, :, : self.columns[group]]

    def note(self, slots: Tensor, lens: Tensor, table: Tensor, page_rows: int) -> None:
        """A layer picked these, as `Picks.note` takes them."""
        if self.picks is not None:
            self.picks.note(slots, lens, table, page_rows)


def open_step(
    state: SequenceState,
    rows: Tensor,
    start: Tensor,
    query_lens: Tensor,
    width: int,
    shift: int = 0,
) -> StepView:
    """Queries at positions start .. start + query_lens of each row.

    `shift` 1 reads the tokens behind them, which a drafter joins with their hidden states.

    rows, start, query_lens: int32 [B]. Columns past `query_lens` are padding.
    """
    tokens, positions, kv_lens, write_slots = ops.open_step(
        state.tokens, state.page_tables, rows, start, query_lens, width, shift, state.page_sizes
    )
    return StepView(rows, tokens, positions, kv_lens, write_slots, state.page_tables, state.columns)
