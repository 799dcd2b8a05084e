# SPDX-License-Identifier: Apache-2.0
"""A device without tensors: it does to lengths what a round does, and says how long it took."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from freewheel.simulate.costs import RoundCost
from freewheel.simulate.script import Script
from freewheel.simulate.trace import Call
from freewheel.spec import FinishReason, RowResult, StepPlan, StepResult, StepShape

Gain = tuple[int, int, int]
"""What a row gained in a decoding round, drafted and agreed."""

_NOTHING: Gain = (0, 0, 0)


@dataclass(eq=False, slots=True)
class Row:
    """Lengths as in the device state, and the call whose tokens the row holds."""

    known: int
    computed: int
    limit: int
    number: int
    call: Call


class StubDevice:
    """Answers plans as a device would: same lengths, tokens of the script, drafts by lot.

    `acceptance[i]`: of the rounds that verify that many drafts, the share in which draft i and all
    before it are right; never rising. An admission's seed is the number of its call.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        script: Script,
        acceptance: Sequence[float],
        cost: RoundCost,
        row_width: int,
        seed: int = 0,
    ) -> None:
        self._calls, self._script, self._cost = calls, script, cost
        self._acceptance = tuple(acceptance)
        self._row_width = row_width
        self._random = random.Random(seed)
        self._rows: dict[int, Row] = {}

    def execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        """The letter home, and the seconds that the round took."""
        keys = 0
        results: list[RowResult] = []
        for number, admission in zip(plan.rows, plan.admissions, strict=True):
            if admission is not None:
                call = self._calls[admission.seed]
                self._rows[number] = Row(
                    admission.known, admission.computed, admission.limit, admission.seed, call
                )
            row = self._rows[number]
            results.append(self._advance(number, row, plan.shape))
            keys += row.computed
        seconds = self._cost.seconds(plan.shape, keys)
        return StepResult(plan.round_id, tuple(results)), seconds

    def row(self, number: int) -> Row:
        """Of a request that was admitted to it."""
        return self._rows[number]

    def answer(self, row: Row, start: int, stop: int) -> tuple[int, ...]:
        """The row's tokens at these positions, behind its prompt."""
        return self._script.answer(row.call, row.number, start, stop)

    def decode(self, rows: Sequence[Row], shape: StepShape) -> tuple[list[Gain], float]:
        """A decoding round of rows of which all but the last certain token is computed; and the
        seconds that it took.
        """
        found: list[Gain] = []
        keys, most, width = 0, shape.width - 1, self._row_width
        for row in rows:
            known, left = row.known, row.limit - row.known
            if left <= 0:
                keys += row.computed
                found.append(_NOTHING)
                continue
            drafted = most if known + most <= width else width - known
            agreed = self._agreed(drafted) if drafted else 0
            gained = agreed + 1 if agreed < left else left
            row.known = known + gained
            row.computed = known + gained - 1
            keys += row.computed
            found.append((gained, drafted, agreed if agreed < gained else gained))
        return found, self._cost.seconds(shape, keys)

    def _advance(self, number: int, row: Row, shape: StepShape) -> RowResult:
        if row.known >= row.limit:
            return RowResult(number, (), None, row.computed, 0, 0)
        start = row.computed
        given = min(row.known - start, shape.width)
        if start + given < row.known:
            row.computed += given
            return RowResult(number, (), None, row.computed, 0, 0)
        drafted = 0 if shape.for_prompts else self._drafted(start + given, shape.width - given)
        agreed = self._agreed(drafted) if drafted else 0
        gained = min(agreed + 1, row.limit - row.known)
        stop = row.known + gained
        tokens = self._script.answer(row.call, row.number, row.known, stop)
        row.known, row.computed = stop, stop - 1
        finish = FinishReason.LENGTH if stop >= row.limit else None
        return RowResult(number, tokens, finish, row.computed, drafted, min(agreed, gained))

    def _drafted(self, known: int, room: int) -> int:
        return max(0, min(room, self._row_width - known))

    def _agreed(self, drafted: int) -> int:
        lot = self._random.random()
        agreed = 0
        while agreed < drafted and lot < self._acceptance[agreed]:
            agreed += 1
        return agreed
