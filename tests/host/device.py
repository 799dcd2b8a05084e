# SPDX-License-Identifier: Apache-2.0
"""A device in pure Python: rows, page tables and rounds, with a toy model that reads its pages.

The model: `value[p]` is a hash of `value[p - 1]`, read through the page table, and `token[p]`; the
token after p is a function of (value[p], seed, p). One wrong token, page or column changes every
token from there on. A drafter's rows are modelled too: each remembers the token behind its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from freewheel.host import Request
from freewheel.spec import (
    MAX_VERIFY_WIDTH,
    CacheGroup,
    Feed,
    FinishReason,
    PageCopy,
    RowResult,
    StepPlan,
    StepResult,
    StepShape,
    Transfer,
    TransferResult,
    Way,
)

VOCABULARY = 40


def next_value(before: int, token: int) -> int:
    return hash((before, token)) & 0xFFFFFFFF


def next_token(value: int, seed: int, position: int, masked: tuple[int, ...]) -> int:
    token = hash((value, seed, position)) % VOCABULARY
    while token in masked:
        token = (token + 1) % VOCABULARY
    return token


def verdict(token: int, length: int, limit: int, stop_ids: tuple[int, ...]) -> FinishReason | None:
    if token in stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= limit else None


def solo(request: Request) -> tuple[list[int], FinishReason]:
    """The output of a request that runs alone, one token at a time."""
    value = 0
    for token in request.prompt:
        value = next_value(value, token)
    length = len(request.prompt)
    asked = request.params.max_tokens
    limit = request.context_len if asked is None else min(length + asked, request.context_len)
    minimum = length + request.params.min_tokens
    output: list[int] = []
    while True:
        masked = request.stop_ids if length < minimum else ()
        token = next_token(value, request.seed, length - 1, masked)
        output.append(token)
        length += 1
        reason = verdict(token, length, limit, request.stop_ids)
        if reason is not None:
            return output, reason
        value = next_value(value, token)


@dataclass
class Row:
    known: int
    computed: int
    limit: int
    minimum: int
    seed: int
    stop_ids: tuple[int, ...]
    tables: list[dict[int, int]]
    found: int
    tokens: dict[int, int] = field(default_factory=dict)


@dataclass
class Slot:
    """A block in host memory: what each place holds."""

    label: int
    pages: dict[tuple[int, int], tuple[dict[int, tuple[int, int]], dict[int, int]]]


class Device:
    """Executes plans in order. Asserts that every access lands in a page of the row's tenant."""

    def __init__(self, groups: tuple[CacheGroup, ...], row_width: int, rng: random.Random):
        self.groups = groups
        self.row_width = row_width
        self.rng = rng
        self.rows: dict[int, Row] = {}
        self.cells: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.successors: dict[tuple[int, int, int], int] = {}
        self.slots: dict[int, Slot] = {}

    def move(self, transfer: Transfer) -> TransferResult:
        """Copy blocks to slots of host memory or back; a slot with another label is damaged."""
        damaged: set[int] = set()
        for index, copy in enumerate(transfer.blocks):
            places = [(g, i, p) for g, own in enumerate(copy.pages) for i, p in enumerate(own)]
            if transfer.way is Way.OUT:
                held = {(g, i): self.page(g, page) for g, i, page in places}
                self.slots[copy.slot] = Slot(copy.label, held)
                continue
            slot = self.slots[copy.slot]
            if slot.label != copy.label:
                damaged.add(index)
            for group, place, page in places:
                cells, successors = slot.pages.get((group, place), ({}, {}))
                for offset in range(self.groups[group].page_size):
                    cell = (group, page, offset)
                    self.cells[cell] = cells.get(offset, (-1, -1))
                    self.successors.pop(cell, None)
                    if offset in successors:
                        self.successors[cell] = successors[offset]
        return TransferResult(transfer.id, frozenset(damaged))

    def page(self, group: int, page: int) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
        """What one page holds, by offset: values, and what the drafter has read behind them."""
        cells = {o: v for (g, p, o), v in self.cells.items() if (g, p) == (group, page)}
        behind = {o: v for (g, p, o), v in self.successors.items() if (g, p) == (group, page)}
        return cells, behind

    def take_over(self, copy: PageCopy) -> None:
        """Only whole pages are copied; nothing that the target held is left."""
        cells, behind = self.page(copy.group, copy.source)
        assert len(cells) == len(behind) == self.groups[copy.group].page_size, "not a whole page"
        for offset, value in cells.items():
            self.cells[copy.group, copy.target, offset] = value
            self.successors[copy.group, copy.target, offset] = behind[offset]

    def execute(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self.take_over(copy)
        for row, admission, feed in zip(plan.rows, plan.admissions, plan.feeds, strict=True):
            if admission is not None:
                self.rows[row] = Row(
                    admission.known,
                    admission.computed,
                    admission.limit,
                    admission.minimum,
                    admission.seed,
                    admission.stop_ids,
                    [{} for _ in self.groups],
                    admission.computed,
                )
            if feed is not None:
                self.feed(self.rows[row], feed)
        for write in plan.page_writes:
            self.rows[write.row].tables[write.group][write.column] = write.page
        return StepResult(plan.round_id, tuple(self.advance(r, plan.shape) for r in plan.rows))

    def feed(self, row: Row, feed: Feed) -> None:
        for position, token in enumerate(feed.tokens, feed.start):
            assert position < row.known
            assert row.tokens.setdefault(position, token) == token, "fed twice, and differently"

    def advance(self, number: int, shape: StepShape) -> RowResult:
        row = self.rows[number]
        if row.known >= row.limit:
            return RowResult(number, (), None, row.computed, 0, 0)
        start, given = row.computed, min(row.known - row.computed, shape.width)
        assert given > 0
        value = self.read(row, start)
        for position in range(start, start + given):
            value = self.store(row, position, value, row.tokens[position])
        if start + given < row.known:
            assert start + given in row.tokens, "the drafter reads the token behind the chunk"
            row.computed += given
            self.catch_up(row, start)
            return RowResult(number, (), None, row.computed, 0, 0)
        room = min(shape.width - given, self.row_width - start - given)
        drafted = room if shape.width <= MAX_VERIFY_WIDTH else 0
        agreeing = self.rng.randint(0, drafted)
        tokens, finish = self.verify(row, value, drafted, agreeing)
        row.known += len(tokens)
        row.computed = row.known - 1
        self.catch_up(row, start)
        if finish is not None:
            row.limit = row.known
        else:
            self.draft(row, shape.depth, start + shape.reach)
        agreed = min(agreeing, len(tokens))
        return RowResult(number, tuple(tokens), finish, row.computed, drafted, agreed)

    def verify(
        self, row: Row, value: int, drafted: int, agreeing: int
    ) -> tuple[list[int], FinishReason | None]:
        """Choose behind the last certain token, and store the drafts, of which some agree."""
        tokens: list[int] = []
        finish: FinishReason | None = None
        for index in range(drafted + 1):
            length = row.known + index
            masked = row.stop_ids if length < row.minimum else ()
            choice = next_token(value, row.seed, length - 1, masked)
            if index <= agreeing and finish is None:
                tokens.append(choice)
                row.tokens[length] = choice
                finish = verdict(choice, length + 1, row.limit, row.stop_ids)
            if index < drafted:
                draft = choice if index < agreeing else (choice + 1) % VOCABULARY
                value = self.store(row, length, value, draft)
        return tokens, finish

    def draft(self, row: Row, depth: int, border: int) -> None:
        for position in range(row.computed, min(row.computed + depth, self.row_width)):
            assert position < border, "a draft beyond the round's reach"
            self.store(row, position, -1, -1)

    def cell(self, row: Row, group: int, position: int) -> tuple[int, int, int]:
        column, offset = divmod(position, self.groups[group].page_size)
        assert column in row.tables[group], f"column {column} was not written before use"
        page = row.tables[group][column]
        assert page > 0, "scratch page in use"
        return group, page, offset

    def store(self, row: Row, position: int, before: int, token: int) -> int:
        value = next_value(before, token)
        for group in range(len(self.groups)):
            self.cells[self.cell(row, group, position)] = (position, value)
            self.successors.pop(self.cell(row, group, position), None)
        return value

    def catch_up(self, row: Row, start: int) -> None:
        """The drafter's rows of everything that this round computed."""
        for position in range(start, row.computed):
            for group in range(len(self.groups)):
                self.successors[self.cell(row, group, position)] = row.tokens[position + 1]

    def read(self, row: Row, start: int) -> int:
        """The value before `start`, after a look at everything that must still be readable."""
        values = [0]
        for position in range(start):
            values.append(next_value(values[-1], row.tokens[position]))
        for group, spec in enumerate(self.groups):
            first = 0 if spec.retention is None else max(0, start - spec.retention)
            if spec.retention is not None and row.found:
                first = max(first, row.found - spec.resume_tokens)
            for position in range(first, start):
                cell = self.cell(row, group, position)
                assert self.cells[cell] == (position, values[position + 1]), "another's page"
                assert self.successors[cell] == row.tokens[position + 1], "another's draft row"
        return values[-1]
