# SPDX-License-Identifier: Apache-2.0
"""A device without tensors: it does to lengths what a round does, and says how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freewheel.simulate.costs import RoundCost
from freewheel.simulate.luck import LOTS, Luck
from freewheel.simulate.script import Script
from freewheel.simulate.trace import Call
from freewheel.spec import FinishReason, RowResult, StepPlan, StepResult, StepShape


@dataclass(eq=False, slots=True)
class Row:
    """Lengths as in the device state, and the call whose tokens the row holds.

    `lot`: of its next decoding round, in `Luck`.
    """

    known: int
    computed: int
    limit: int
    number: int
    call: Call
    lot: int


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
        self._calls, self._script = calls, script
        self.cost = cost
        self.luck = Luck(acceptance, seed)
        self._row_width = row_width
        self._rows: dict[int, Row] = {}

    def execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        """The letter home, and the seconds that the round took."""
        keys = 0
        results: list[RowResult] = []
        for number, admission in zip(plan.rows, plan.admissions, strict=True):
            if admission is not None:
                call = self._calls[admission.seed]
                known = admission.known
                lot = self.luck.begins(admission.seed, known)
                self._rows[number] = Row(
                    known, admission.computed, admission.limit, admission.seed, call, lot
                )
            row = self._rows[number]
            results.append(self._advance(number, row, plan.shape))
            keys += row.computed
        seconds = self.cost.seconds(plan.shape, keys)
        return StepResult(plan.round_id, tuple(results)), seconds

    def row(self, number: int) -> Row:
        """Of a request that was admitted to it."""
        return self._rows[number]

    def _advance(self, number: int, row: Row, shape: StepShape) -> RowResult:
        if row.known >= row.limit:
            return RowResult(number, (), None, row.computed, 0, 0)
        start = row.computed
        given = min(row.known - start, shape.width)
        if start + given < row.known:
            row.computed += given
            return RowResult(number, (), None, row.computed, 0, 0)
        drafted = agreed = 0
        if not shape.for_prompts:
            drafted = max(0, min(shape.width - given, self._row_width - row.known))
            agreed = min(drafted, self.luck.right[row.lot])
            row.lot = (row.lot + 1) % LOTS
        gained = min(agreed + 1, row.limit - row.known)
        stop = row.known + gained
        tokens = self._script.answer(row.call, row.number, row.known, stop)
        row.known, row.computed = stop, stop - 1
        finish = FinishReason.LENGTH if stop >= row.limit else None
        return RowResult(number, tokens, finish, row.computed, drafted, min(agreed, gained))
