# SPDX-License-Identifier: Apache-2.0
"""The rows: everything the device knows about every request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel.spec.cache import CacheGroup
from freewheel.spec.sampling import MAX_STOP_IDS
from freewheel.state.adjust import AdjustColumns
from freewheel.state.arena import Arena


@dataclass(frozen=True)
class SequenceState:
    """R rows of T tokens. Row 0 is scratch: padding rows of a batch point at it.

    A row holds `known_lens` certain tokens and up to `draft_lens` drafts behind them; the first
    `computed_lens` have their cache rows stored. T is the context limit and the headroom that
    drafts may overrun it by; every per-row buffer is sized by it. Of P page-table columns, group g
    uses the first `columns[g]`. Lengths and positions are absolute. A row whose known length
    reached its limit idles.
    """

    tokens: Tensor  # int32 [R, T]
    known_lens: Tensor  # int32 [R]
    computed_lens: Tensor  # int32 [R]
    draft_lens: Tensor  # int32 [R]
    limit_lens: Tensor  # int32 [R]
    minimum_lens: Tensor  # int32 [R]  stop ids are masked until the row holds this many tokens
    page_tables: Tensor  # int32 [G, R, P]
    temperature: Tensor  # float32 [R]
    top_p: Tensor  # float32 [R]
    min_p: Tensor  # float32 [R]
    top_k: Tensor  # int32 [R]
    seeds: Tensor  # int64 [R]
    stop_ids: Tensor  # int32 [R, MAX_STOP_IDS]  -1 where unused
    uses: Tensor  # int32 [R]  USES bits: which columns of `adjust` hold for the row
    adjust: AdjustColumns
    vocabulary: int
    page_sizes: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def build(
        cls,
        arena: Arena,
        rows: int,
        row_width: int,
        groups: tuple[CacheGroup, ...],
        vocabulary: int = 0,
        grammars: int = 0,
    ) -> SequenceState:
        """`rows` rows, the scratch row included, each `row_width` tokens wide.

        `vocabulary`: tokens; 0 for a state whose rows never adjust logits. `grammars`: tables that
        fit at one time.
        """
        columns = tuple(group.pages_for(row_width) for group in groups)

        def ints(name: str, *shape: int, fill: int = 0) -> Tensor:
            return arena.new(f"state.{name}", shape, torch.int32, fill)

        def floats(name: str) -> Tensor:
            return arena.new(f"state.{name}", (rows,), torch.float32)

        return cls(
            tokens=ints("tokens", rows, row_width),
            known_lens=ints("known_lens", rows),
            computed_lens=ints("computed_lens", rows),
            draft_lens=ints("draft_lens", rows),
            limit_lens=ints("limit_lens", rows),
            minimum_lens=ints("minimum_lens", rows),
            page_tables=ints("page_tables", len(groups), rows, max(columns)),
            temperature=floats("temperature"),
            top_p=floats("top_p"),
            min_p=floats("min_p"),
            top_k=ints("top_k", rows),
            seeds=arena.new("state.seeds", (rows,), torch.int64),
            stop_ids=ints("stop_ids", rows, MAX_STOP_IDS, fill=-1),
            uses=ints("uses", rows),
            adjust=AdjustColumns.build(arena, rows, vocabulary, grammars),
            vocabulary=vocabulary,
            page_sizes=tuple(group.page_size for group in groups),
            columns=columns,
        )

    @property
    def lengths(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """known, computed, draft and limit lengths: what a round opens and commits by."""
        return self.known_lens, self.computed_lens, self.draft_lens, self.limit_lens

    @property
    def sampling(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the choice of a token depends on besides its logits, as `ops.choose` takes it."""
        return (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seeds,
            self.stop_ids,
            self.minimum_lens,
        )
