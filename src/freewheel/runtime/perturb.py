# SPDX-License-Identifier: Apache-2.0
"""Damage on purpose: now and then a bit of what a running request reads turns over.

For whoever wants to see a canary work. The schedule is seeded: the same plans and letters, the same
damage. It is done in the stream of rounds, between two of them, and nothing is read for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freewheel.spec.cache import CacheField, CacheGroup
from freewheel.spec.plan import StepPlan, StepResult
from freewheel.spec.violation import KINDS, KV, PAGE_TABLE, TOKENS
from freewheel.state import CachePool, SequenceState


@dataclass(frozen=True)
class Damage:
    """`kind`: of `spec.violation`'s KINDS; `page` of group `group`, where it is that."""

    round_id: int
    row: int
    kind: str
    group: int = 0
    page: int = 0


@dataclass
class _Tenant:
    """What the letters so far say of a row. `ahead`: tokens by which rounds under way may have
    advanced it beyond `computed`. `whole`: nothing was damaged, and it has not ended."""

    since: int
    computed: int
    ahead: int = 0
    tables: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    whole: bool = True


class Perturber:
    """Damages one row, if one is whole, in one of `every` rounds on the average.

    By lot, not by turns: a request that takes as many rounds to be computed anew as lie between two
    turns would never be done.

    `unread`: the most positions whose rows a drafter may not have stored.
    """

    def __init__(
        self, state: SequenceState, cache: CachePool, every: int, seed: int, unread: int = 0
    ) -> None:
        self._state, self._cache = state, cache
        self._every, self._unread = every, unread
        self._rng = random.Random(seed)
        self._tenants: dict[int, _Tenant] = {}
        self._widths: dict[tuple[int, int], int] = {}
        self.done: list[Damage] = []

    def before(self, plan: StepPlan) -> None:
        """In the stream of rounds, before the round."""
        new = self._note(plan)
        if self._rng.random() * self._every < 1:
            self._strike(plan, new)
        for row in plan.rows:
            self._tenants[row].ahead += plan.shape.width
            self._widths[plan.round_id, row] = plan.shape.width

    def _strike(self, plan: StepPlan, new: set[int]) -> None:
        rows = [row for row in plan.rows if self._tenants[row].whole]
        self._rng.shuffle(rows)
        for row in rows:
            damage = self._damage(plan.round_id, row, only_pages=row in new)
            if damage is not None:
                self._tenants[row].whole = False
                self.done.append(damage)
                return

    def heard(self, result: StepResult) -> None:
        """A letter was read."""
        for row in result.rows:
            tenant = self._tenants[row.row]
            width = self._widths.pop((result.round_id, row.row), 0)
            if result.round_id < tenant.since:
                continue  # of a tenant before
            tenant.ahead -= width
            if row.violation is not None or row.finish is not None:
                tenant.whole = False
            else:
                tenant.computed = max(tenant.computed, row.computed)

    def _note(self, plan: StepPlan) -> set[int]:
        """Follow the letter; the rows that have a new tenant."""
        new: set[int] = set()
        for row, admission in zip(plan.rows, plan.admissions, strict=True):
            if admission is not None:
                self._tenants[row] = _Tenant(plan.round_id, admission.computed)
                new.add(row)
        for write in plan.page_writes:
            self._tenants[write.row].tables[write.group, write.column] = write.page
        return new

    def _damage(self, round_id: int, row: int, only_pages: bool) -> Damage | None:
        """Of one kind or another; None if the row has nothing yet that would be missed."""
        kinds = [KV] if only_pages else [KV, PAGE_TABLE, TOKENS]
        kind = self._rng.choice(kinds)
        tenant = self._tenants[row]
        if tenant.computed - self._unread <= 0:
            return None
        if kind == TOKENS:
            self._change_token(row, tenant.computed)
            return Damage(round_id, row, KINDS[kind])
        groups = list(enumerate(self._cache.groups))
        self._rng.shuffle(groups)
        for index, group in groups:
            done = self._in_group(round_id, row, kind, index, group)
            if done is not None:
                return done
        return None

    def _in_group(
        self, round_id: int, row: int, kind: int, index: int, group: CacheGroup
    ) -> Damage | None:
        tenant = self._tenants[row]
        end = (tenant.computed - self._unread) // group.stride
        first = 0
        if group.retention is not None:
            first = max(0, tenant.computed + tenant.ahead - group.retention)
        places = [
            place
            for place in range(first, end)
            if (index, place // group.page_rows) in tenant.tables
        ]
        if not places:
            return None
        place = self._rng.choice(places)
        column = place // group.page_rows
        page = tenant.tables[index, column]
        if kind == PAGE_TABLE:
            others = [p for p in range(self._cache.pages[index]) if p != page]
            self._state.page_tables[index, row, column].fill_(self._rng.choice(others))
        else:
            self._flip(index, group, page, place % group.page_rows)
        return Damage(round_id, row, KINDS[kind], index, page)

    def _flip(self, index: int, group: CacheGroup, page: int, row: int) -> None:
        """One bit of one layer of one field of a stored row."""
        nth = self._rng.randrange(len(group.fields))
        stored, shape = self._cache.stored(group.name)[nth], group.fields[nth]
        at = self._word(stored, shape, row)
        layer = self._rng.randrange(stored.shape[0])
        words = stored[layer, page].flatten().view(torch.int32)  # int32 [words]
        bit = self._rng.randrange(31)
        words[at].bitwise_xor_(1 << bit)

    def _word(self, stored: Tensor, shape: CacheField, row: int) -> int:
        """The place in a page of some word of a row."""
        word = self._rng.randrange(stored.shape[3] * stored.element_size() // 4)
        at = 0
        for part in shape.parts:
            size = part * stored.element_size() // 4
            if word < size:
                return at + row * size + word
            word, at = word - size, at + stored.shape[2] * size
        raise AssertionError("a row is as wide as its parts")

    def _change_token(self, row: int, computed: int) -> None:
        place = self._rng.randrange(computed)
        token = self._state.tokens[row, place]
        token.bitwise_xor_(1 << self._rng.randrange(7))
