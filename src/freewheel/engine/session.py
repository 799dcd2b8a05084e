# SPDX-License-Identifier: Apache-2.0
"""Requests in, chunks of text out: drives the scheduler and the executor round by round."""

from __future__ import annotations

import time
from dataclasses import dataclass

from freewheel.engine.output import Chunk, Metrics, Piece
from freewheel.host import Request, Scheduler, TextDelta, TextStream, Update
from freewheel.runtime import Executor
from freewheel.spec import FinishReason


@dataclass
class _Live:
    """A request that has not ended, and its text so far."""

    request: Request
    text: TextStream
    started: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    first_token: float | None = None


class Session:
    """Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._live: dict[str, _Live] = {}

    @property
    def busy(self) -> bool:
        """Some request has not ended."""
        return bool(self._live)

    def add(self, request: Request, text: TextStream) -> None:
        """Queue a request. Raises RequestError, and changes nothing, if it cannot be served."""
        self._scheduler.add(request)
        self._live[request.id] = _Live(request, text, time.perf_counter())

    def abort(self, request_id: str) -> None:
        """Forget a request, if it has not ended."""
        self._scheduler.abort(request_id)
        self._live.pop(request_id, None)

    def step(self) -> list[tuple[str, Chunk]]:
        """Launch a round if one can be, read a letter if one is due; what came, by request."""
        plan = self._scheduler.plan()
        if plan is not None:
            self._executor.launch(plan)
            if self._executor.in_flight <= self._scheduler.run_ahead:
                return []
        if not self._executor.in_flight:
            return []
        updates = self._scheduler.collect(self._executor.collect(), time.perf_counter())
        return [(update.request.id, self._deliver(update)) for update in updates]

    def drain(self) -> None:
        """Read the letters of rounds still in flight after the last request ended."""
        while self._executor.in_flight:
            self._scheduler.collect(self._executor.collect(), time.perf_counter())

    def _deliver(self, update: Update) -> Chunk:
        live = self._live[update.request.id]
        if update.tokens:
            live.rounds += 1
            live.first_token = live.first_token or time.perf_counter()
        before = len(update.request.output) - len(update.tokens)
        finish, delta = self._read(live, update)
        kept = update.tokens[: delta.tokens_used - before] if delta.stopped else update.tokens
        drafts_until = before + update.accepted
        live.accepted += min(update.accepted, len(kept))
        pieces = tuple(Piece(text, before <= at < drafts_until) for text, at in delta.pieces)
        if finish is None:
            return Chunk(pieces, kept, None, None)
        del self._live[update.request.id]
        return Chunk(pieces, kept, finish, _metrics(live))

    def _read(self, live: _Live, update: Update) -> tuple[FinishReason | None, TextDelta]:
        """Text of the update's tokens, and why the request ends with them, if it does.

        A stop token has no text; a stop string ends the request before whatever the device said.
        """
        ended_by_token = update.finish is FinishReason.STOP
        delta = live.text.push(update.tokens[:-1] if ended_by_token else update.tokens)
        if delta.stopped:
            self._scheduler.finish(update.request.id, FinishReason.STOP, delta.tokens_used)
            return FinishReason.STOP, delta
        if update.finish is None:
            return None, delta
        rest = live.text.flush()
        joined = TextDelta(
            delta.text + rest.text, delta.pieces + rest.pieces, rest.stopped, rest.tokens_used
        )
        if joined.stopped:
            self._scheduler.finish(update.request.id, FinishReason.STOP, joined.tokens_used)
            return FinishReason.STOP, joined
        return update.finish, joined


def _metrics(live: _Live) -> Metrics:
    now = time.perf_counter()
    request = live.request
    return Metrics(
        prompt_tokens=len(request.prompt),
        completion_tokens=len(request.output),
        rounds=live.rounds,
        drafted=request.stats.drafted,
        accepted=live.accepted,
        first_token_seconds=(live.first_token or now) - live.started,
        total_seconds=now - live.started,
    )
