# SPDX-License-Identifier: Apache-2.0
"""The last rounds and waits, for the page and for traces."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from freewheel.engine import RoundTimes
from freewheel.server.tickets import Ticket
from freewheel.server.wire import Step

KEPT = 512


@dataclass(frozen=True)
class Wait:
    """Seconds until a first token, or on average between the tokens of one round and the next."""

    number: int
    kind: str
    seconds: float


@dataclass
class Recent:
    """What happened last, each thing with a number that counts up over restarts of the engine."""

    rounds: deque[tuple[int, RoundTimes]] = field(default_factory=lambda: deque(maxlen=KEPT))
    waits: deque[Wait] = field(default_factory=lambda: deque(maxlen=KEPT))
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def round(self, times: RoundTimes) -> None:
        """A round has been read."""
        self.rounds.append((self._next(), times))

    def step(self, ticket: Ticket, step: Step, before: float) -> None:
        """Tokens have come for a request."""
        if not step.tokens or ticket.first is None or ticket.latest is None:
            return
        if ticket.tokens == len(step.tokens):
            self.waits.append(Wait(self._next(), "first", ticket.first - ticket.opened))
        else:
            each = (ticket.latest - before) / len(step.tokens)
            self.waits.append(Wait(self._next(), "between", each))

    def since(self, number: int) -> dict[str, Any]:
        """What has a greater number, as JSON: times in seconds, on the clock of `now`."""
        rounds = [(n, one) for n, one in self.rounds if n > number]
        waits = [one for one in self.waits if one.number > number]
        latest = max([number, *(n for n, _ in rounds), *(one.number for one in waits)])
        return {
            "now": time.perf_counter(),
            "number": latest,
            "rounds": [one for _, one in rounds],
            "waits": waits,
        }

    def trace(self, device: str) -> dict[str, Any]:
        """The rounds as a trace for Perfetto: a lane of the host, a lane of the device."""
        events: list[dict[str, Any]] = [
            _name(1, "host"),
            _name(2, f"device ({device})"),
        ]
        free = 0.0
        for number, one in self.rounds:
            label = f"round {one.round_id}: {one.batch}x{one.width}+{one.depth}"
            details = {"number": number, "rows": one.rows, "tokens": one.tokens} | {
                "accepted": one.accepted
            }
            spans = (
                ("plan", one.begun, one.planned),
                ("launch", one.planned, one.launched),
                ("wait for the letter", one.asked, one.arrived),
                ("deliver", one.arrived, one.delivered),
            )
            events += [_span(1, name, start, end, details) for name, start, end in spans]
            start, free = device_span(one, device, free)
            events.append(_span(2, label, start, free, details))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _next(self) -> int:
        return next(self.numbers)


def device_span(times: RoundTimes, device: str, free: float) -> tuple[float, float]:
    """When the device worked on a round, as far as the host can tell; `free`: since when it could.

    On a CPU a round runs inside its launch. On a GPU it begins when it was launched and the one
    before has ended, and has ended when its letter is here.
    """
    if device == "cpu":
        return times.planned, times.launched
    return max(times.launched, free), max(times.arrived, free)


def _name(lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}}


def _span(
    lane: int, name: str, start: float, end: float, details: dict[str, int]
) -> dict[str, Any]:
    times = {"ts": round(start * 1e6, 1), "dur": round(max(end - start, 0.0) * 1e6, 1)}
    return {"ph": "X", "pid": 1, "tid": lane, "name": name, "args": details} | times
