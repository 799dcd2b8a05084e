# SPDX-License-Identifier: Apache-2.0
"""One request at the engine, as the HTTP process holds it."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from freewheel.server.failures import ApiError
from freewheel.server.wire import Step
from freewheel.spec import SamplingParams

TRACE_PARENT: ContextVar[str] = ContextVar("trace_parent", default="")
"""The `traceparent` header of the HTTP request that is being answered."""

Events = asyncio.Queue[tuple["Ticket", Step | ApiError]]


@dataclass(eq=False)
class Ticket:
    """What was asked, and what has come. Its events end with a finish or with an error.

    Times are of `time.perf_counter`. `events` may be shared by several tickets. `trace_parent` is
    the client's, so that the answer's span can be part of its trace. `verified`: rounds with
    drafts.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    events: Events
    opened: float = field(default_factory=time.perf_counter)
    first: float | None = None
    latest: float | None = None
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    queued_seconds: float | None = None
    cached_tokens: int = 0
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    ended: bool = False
    trace_parent: str = field(default_factory=TRACE_PARENT.get)

    @property
    def waits(self) -> bool:
        """Its first token is still to come."""
        return self.first is None and not self.ended

    def note(self, step: Step, now: float) -> None:
        """Count what came."""
        if step.queued_seconds is not None:
            self.queued_seconds = step.queued_seconds
        if step.cached_tokens is not None:
            self.cached_tokens = step.cached_tokens
            self.cached_host_tokens = step.cached_host_tokens
            self.cached_disk_tokens = step.cached_disk_tokens
        if step.tokens:
            self.first = now if self.first is None else self.first
            self.latest = now
        self.tokens += len(step.tokens)
        self.drafted += step.drafted
        self.verified += step.drafted > 0
        self.accepted += step.accepted
        self.ended = self.ended or step.finish is not None

    def fail(self, error: ApiError) -> None:
        """Nothing more will come."""
        self.ended = True
        self.events.put_nowait((self, error))


class Ledger:
    """All tickets that have not ended, and whether one more may be opened."""

    def __init__(self, queue_tokens: int, max_requests: int) -> None:
        self.live: dict[str, Ticket] = {}
        self._queue_tokens = queue_tokens
        self._max_requests = max_requests

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return sum(len(ticket.prompt) for ticket in self.live.values() if ticket.waits)

    def admit(self, tokens: int, count: int) -> None:
        """Raise ApiError 429 if `count` requests of `tokens` tokens in all are too many now.

        A queue that holds nothing takes one of any size: it could never be served otherwise.
        """
        waiting = self.waiting_tokens
        if len(self.live) + count > self._max_requests:
            raise _too_busy(
                f"{len(self.live)} answers are under way or waiting and {count} more were asked "
                f"for; at most {self._max_requests} may be"
            )
        if waiting and waiting + tokens > self._queue_tokens:
            raise _too_busy(
                f"{waiting} prompt tokens wait and {tokens} more came; at most "
                f"{self._queue_tokens} may wait"
            )


def _too_busy(message: str) -> ApiError:
    return ApiError(429, message, code="overloaded", retry_after=1)
