# SPDX-License-Identifier: Apache-2.0
"""When the host planned, launched and read each round: for pictures and traces."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from freewheel.spec import StepPlan, StepResult

KEPT = 256
"""Rounds that are remembered until somebody takes them."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One round on the host's clock (`time.perf_counter`), in seconds.

    The host plans from `begun` to `planned` and launches until `launched`; it asks for the letter
    at `asked`, has it at `arrived` and has handed it on at `delivered`. `rows` of the rectangle
    were in use; `tokens` were decided, `accepted` of them drafts.
    """

    round_id: int
    batch: int
    width: int
    depth: int
    rows: int
    begun: float
    planned: float
    launched: float
    asked: float
    arrived: float
    delivered: float
    tokens: int
    accepted: int


class Timeline:
    """The rounds that were read last, oldest first."""

    def __init__(self) -> None:
        self._in_flight: dict[int, tuple[StepPlan, float, float, float]] = {}
        self._done: deque[RoundTimes] = deque(maxlen=KEPT)

    def launched(self, plan: StepPlan, begun: float, planned: float, launched: float) -> None:
        """A round is under way."""
        self._in_flight[plan.round_id] = (plan, begun, planned, launched)

    def read(self, letter: StepResult, asked: float, arrived: float, delivered: float) -> None:
        """Its letter has been read and handed on."""
        plan, begun, planned, launched = self._in_flight.pop(letter.round_id)
        shape, rows = plan.shape, [row for copy in letter.each for row in copy.rows]
        self._done.append(
            RoundTimes(
                round_id=letter.round_id,
                batch=shape.batch,
                width=shape.width,
                depth=shape.depth,
                rows=sum(len(copy.rows) for copy in plan.each),
                begun=begun,
                planned=planned,
                launched=launched,
                asked=asked,
                arrived=arrived,
                delivered=delivered,
                tokens=sum(len(row.tokens) for row in rows),
                accepted=sum(row.agreed for row in rows),
            )
        )

    def take(self) -> list[RoundTimes]:
        """The rounds read since the last call."""
        taken = list(self._done)
        self._done.clear()
        return taken

    def forget(self) -> None:
        """Rounds in flight will not be read: their ids may come again."""
        self._in_flight.clear()
