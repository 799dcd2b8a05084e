# SPDX-License-Identifier: Apache-2.0
"""Checksums beside the rows: what nobody wrote is found before anything is computed from it.

Behind every round, what it made certain is summed up: stored rows into the sum of their page,
tokens into that of their row. Before the next one computes, the sums are taken again. A row that
differs is struck: this round and all that are under way pass it by, as if it were padding, until it
has its next tenant, and its letter says why (`spec.violation`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel import ops
from freewheel.errors import ConfigError
from freewheel.spec.cache import CacheGroup
from freewheel.spec.mesh import LAYER_RANKS
from freewheel.spec.shape import MAX_LAG, StepShape
from freewheel.spec.violation import COLUMNS_A_WORD, KV, PAGE_TABLE, TOKENS, VerdictLayout
from freewheel.state.arena import Arena
from freewheel.state.letters import ADMISSION_WORDS, PAGE_WRITE_WORDS, InboxLayout
from freewheel.state.pool import CachePool
from freewheel.state.sequence import SequenceState


@dataclass(frozen=True)
class Canary:
    """R rows, G groups, P columns of a page table.

    `pages`: how many pages of each group and row a decoding round looks at, in turns; None: all. A
    round for prompts looks at all that its rows hold: they may have been found a moment ago.
    `ranks`: those that share this copy of the model; what one of them finds strikes the row on all.
    `unread`: positions that the drafter leaves for later, whose rows are not all stored.
    """

    state: SequenceState
    cache: CachePool
    pages: int | None
    unread: Tensor | None  # int32 [R]
    tables: Tensor  # int32 [G, R, P]  a copy, written by letters alone
    page_sums: tuple[Tensor, ...]  # int64 [pages of the group]  one for each group
    token_sums: Tensor  # int64 [R]
    summed_lens: Tensor  # int32 [R]  tokens in `token_sums`
    sealed_lens: Tensor  # int32 [R]  tokens whose stored rows are in sums of pages
    known_lens: Tensor  # int32 [R]  as of the last round
    computed_lens: Tensor  # int32 [R]  likewise
    turns: Tensor  # int32 [R]  rounds that looked at some pages
    verdicts: Tensor  # int32 [R]  bits of `spec.violation`
    ranks: int = 1

    @classmethod
    def build(
        cls,
        arena: Arena,
        state: SequenceState,
        cache: CachePool,
        pages: int | None,
        unread: Tensor | None = None,
        ranks: int = 1,
    ) -> Canary:
        """Raises ConfigError for rows that are no whole number of 32-bit words."""
        for field in (field for group in cache.groups for field in group.fields):
            if field.row_bytes % 4 or len(field.parts) > 2:
                raise ConfigError(f"canary: cannot sum rows of {field.name}")
        rows = state.tokens.shape[0]

        def ints(name: str, *shape: int) -> Tensor:
            return arena.new(f"canary.{name}", shape or (rows,), torch.int32)

        return cls(
            state=state,
            cache=cache,
            pages=pages,
            unread=unread,
            tables=ints("tables", *state.page_tables.shape),
            page_sums=tuple(
                arena.new(f"canary.sums.{group.name}", (count,), torch.int64)
                for group, count in zip(cache.groups, cache.pages, strict=True)
            ),
            token_sums=arena.new("canary.token_sums", (rows,), torch.int64),
            summed_lens=ints("summed_lens"),
            sealed_lens=ints("sealed_lens"),
            known_lens=ints("known_lens"),
            computed_lens=ints("computed_lens"),
            turns=ints("turns"),
            verdicts=ints("verdicts"),
            ranks=ranks,
        )

    @property
    def layout(self) -> VerdictLayout:
        return VerdictLayout(self.state.columns)

    def check(self, shape: StepShape, inbox: Tensor, outbox: Tensor) -> Tensor:
        """Behind a letter: the rows to work on, int32 [B], row 0 for those that are struck.

        inbox int32 [words]; outbox int32 [B, words], whose last words are the verdict.
        """
        rows = inbox[: shape.batch]
        self._receive(shape, inbox, rows)
        at = rows.long()  # int64 [B]
        differs = (self.state.page_tables[:, at] != self.tables[:, at]).any(2).any(0)  # bool [B]
        kinds = differs.int() * PAGE_TABLE + self._tokens_differ(rows).int() * TOKENS
        bits: list[Tensor] = []
        for index, group in enumerate(self.cache.groups):
            columns = self._columns(index, group, at, shape)
            wrong = self._pages_differ(index, group, at, columns)  # bool [B, C]
            kinds = kinds | wrong.any(1).int() * KV
            bits.append(self._packed(index, columns, wrong))
        self.turns.index_add_(0, at, torch.ones_like(rows))
        own = torch.where(rows > 0, self.verdicts[at] | kinds, 0)  # int32 [B]
        found = self._together(torch.cat([own[:, None], *bits], 1))  # int32 [B, words]
        verdict = found[:, 0]
        self.verdicts.index_put_((at,), verdict)
        outbox[:, outbox.shape[1] - self.layout.words :] = found
        return torch.where(verdict == 0, rows, 0)

    def seal(self, shape: StepShape, rows: Tensor) -> None:
        """Behind a round: sum up what it made certain. rows int32 [B], as `check` gave them."""
        at, state = rows.long(), self.state
        known, computed = state.known_lens[at], state.computed_lens[at]  # int32 [B] each
        whole = computed if self.unread is None else computed - self.unread[at]
        before = self.sealed_lens[at]
        for index, group in enumerate(self.cache.groups):
            self._seal_pages(index, group, at, before, whole, shape)
        self.sealed_lens.index_put_((at,), whole)
        # A prompt's last tokens may not have come yet; the one behind a rectangle has.
        certain = torch.minimum(computed + 1, known)
        fresh = ops.sum_tokens(state.tokens, rows, self.summed_lens[at], certain)
        self.token_sums.index_put_((at,), self.token_sums[at] + fresh)
        self.summed_lens.index_put_((at,), certain)
        self.known_lens.index_put_((at,), known)
        self.computed_lens.index_put_((at,), computed)

    def error_of(self, group: int, page: int) -> Tensor:
        """int64 [1, 1]: by how much a whole page differs from its sum; 0 if it does not."""
        sums = self.page_sums[group][page : page + 1]
        return self._whole_page(group, page) - sums

    def inherit(self, group: int, source: int, target: int) -> None:
        """Page `target` became what `source`, a whole page, is; its last row is to come anew.

        The sum is the source's, so what is wrong there is found here.
        """
        rows = self.cache.groups[group].page_rows
        last = self._sums_of(group, source, rows - 1, rows)  # int64 [1, 1]
        sums = self.page_sums[group]
        sums[target : target + 1] = sums[source : source + 1] - last[0]

    def adopt(self, group: int, page: int) -> None:
        """A whole page was written by a copy that was checked by other means."""
        self.page_sums[group][page : page + 1] = self._whole_page(group, page)[0]

    def _together(self, own: Tensor) -> Tensor:
        """What any rank of this copy of the model has found, as bits; int32, of own's shape."""
        if self.ranks == 1:
            return own
        found = torch.zeros_like(own)
        every = ops.all_gather(own.view(-1), self.ranks, LAYER_RANKS)
        for one in every.view(self.ranks, *own.shape).unbind():
            found = found | one
        return found

    def _receive(self, shape: StepShape, inbox: Tensor, rows: Tensor) -> None:
        """As `ops.apply_inbox` does to page tables; and a new tenant has nothing to its name."""
        width = self.state.tokens.shape[1]
        layout = InboxLayout.of(shape, self.cache.groups, width, self.state.vocabulary)
        words = inbox[layout.admissions : layout.feed_spans].view(shape.batch, ADMISSION_WORDS)
        target = torch.where(words[:, 0] != 0, rows, 0).long()  # int64 [B]
        self.tables.index_fill_(1, target, 0)
        writes = inbox[layout.writes : layout.adjustments].view(-1, PAGE_WRITE_WORDS).long()
        row, group, column, page = writes.unbind(1)
        self.tables.index_put_((group, row, column), page.int())
        for column_of_rows in (self.token_sums, self.summed_lens, self.turns, self.verdicts):
            column_of_rows.index_fill_(0, target, 0)
        known, computed = self.state.known_lens[target], self.state.computed_lens[target]
        self.known_lens.index_put_((target,), known)
        self.computed_lens.index_put_((target,), computed)
        self.sealed_lens.index_put_((target,), computed)

    def _tokens_differ(self, rows: Tensor) -> Tensor:
        """bool [B]: tokens or lengths of the row are not what they were."""
        at, state = rows.long(), self.state
        found = ops.sum_tokens(state.tokens, rows, torch.zeros_like(rows), self.summed_lens[at])
        lens = (state.known_lens[at] != self.known_lens[at]) | (
            state.computed_lens[at] != self.computed_lens[at]
        )
        return (found != self.token_sums[at]) | lens

    def _columns(self, index: int, group: CacheGroup, at: Tensor, shape: StepShape) -> Tensor:
        """int32 [B, C]: columns of the group to look at, -1 for none."""
        sealed = self.sealed_lens[at][:, None]  # int32 [B, 1]
        last = -(-sealed // group.page_size)
        if group.retention is None:
            first, most = torch.zeros_like(sealed), self.state.columns[index]
        else:
            first = (sealed - group.retention).clamp(min=0) // group.page_size
            most = min((group.retention - 1) // group.page_size + 2, self.state.columns[index])
        some = most if self.pages is None or shape.for_prompts else min(self.pages, most)
        step = torch.arange(some, dtype=torch.int32, device=at.device)
        column = first + step
        if some < most:
            turn = self.turns[at][:, None] * some + step
            held = last - first
            column = first + torch.where(step < held, turn % held.clamp(min=1), held)
        return torch.where(column < last, column, -1)

    def _pages_differ(self, index: int, group: CacheGroup, at: Tensor, columns: Tensor) -> Tensor:
        """bool [B, C]: what is sealed of those pages is not what it was."""
        page = self._pages_at(index, at, columns)  # int64 [B, C]
        rows = self.sealed_lens[at][:, None] // group.stride - columns * group.page_rows
        ends = torch.where(page > 0, rows.clamp(0, group.page_rows), 0)
        found = self._sums(index, page, torch.zeros_like(ends), ends)
        return (ends > 0) & (found != self.page_sums[index][page])

    def _seal_pages(
        self,
        index: int,
        group: CacheGroup,
        at: Tensor,
        before: Tensor,
        whole: Tensor,
        shape: StepShape,
    ) -> None:
        reach = shape.width + (0 if self.unread is None else MAX_LAG)
        step = torch.arange((reach - 1) // group.page_size + 2, dtype=torch.int32, device=at.device)
        columns = before[:, None] // group.page_size + step  # int32 [B, C]
        behind = columns * group.page_rows
        begins = (before[:, None] // group.stride - behind).clamp(0, group.page_rows)
        ends = (whole[:, None] // group.stride - behind).clamp(0, group.page_rows)
        live = ends > begins  # bool [B, C]
        page = torch.where(live, self._pages_at(index, at, columns), 0)
        added = self._sums(index, page, begins, torch.where(page > 0, ends, begins))
        sums = self.page_sums[index]
        kept = torch.where(begins > 0, sums[page], 0)
        sums.index_put_((page,), torch.where(page > 0, kept + added, 0))

    def _pages_at(self, index: int, at: Tensor, columns: Tensor) -> Tensor:
        """int64 [B, C]: pages in the copy of the tables; 0 where there is none."""
        inside = (columns >= 0) & (columns < self.state.columns[index])
        column = torch.where(inside, columns, 0).long()
        page = self.tables[index][at[:, None], column]
        count = self.cache.pages[index]  # a page that does not exist may be in a damaged table
        return torch.where(inside & (page > 0) & (page < count), page, 0).long()

    def _sums(self, index: int, page: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
        """int64 [B, C]: over all fields of the group."""
        group = self.cache.groups[index]
        sums = torch.zeros_like(page)
        for label, stored in enumerate(self.cache.stored(group.name)):
            parts = list(group.fields[label].parts)
            ops.sum_pages(stored, page.int(), begins, ends, sums, parts, label)
        return sums

    def _whole_page(self, index: int, page: int) -> Tensor:
        """int64 [1, 1]."""
        return self._sums_of(index, page, 0, self.cache.groups[index].page_rows)

    def _sums_of(self, index: int, page: int, begin: int, end: int) -> Tensor:
        """int64 [1, 1]: of these rows of a page."""
        device = self.page_sums[index].device
        own = torch.full((1, 1), page, dtype=torch.int64, device=device)
        begins = torch.full((1, 1), begin, dtype=torch.int32, device=device)
        return self._sums(index, own, begins, torch.full_like(begins, end))

    def _packed(self, index: int, columns: Tensor, wrong: Tensor) -> Tensor:
        """int32 [B, words]: a bit for each column of the group's table."""
        words = -(-self.state.columns[index] // COLUMNS_A_WORD)
        every = torch.zeros(
            (wrong.shape[0], words * COLUMNS_A_WORD), dtype=torch.int32, device=wrong.device
        )
        every.scatter_add_(1, columns.clamp(min=0).long(), wrong.int())
        bit = torch.arange(COLUMNS_A_WORD, dtype=torch.int32, device=wrong.device)
        return (every.view(-1, words, COLUMNS_A_WORD).clamp(max=1) << bit).sum(2).int()
