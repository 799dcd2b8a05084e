# SPDX-License-Identifier: Apache-2.0
"""Requests in, chunks of text out: drives the scheduler and the executor round by round."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from freewheel.engine.logprobs import prompt_logprobs, token_logprobs
from freewheel.engine.output import Arrival, Chunk, Metrics, Piece
from freewheel.engine.timeline import Timeline
from freewheel.errors import ClosedError, FreewheelError, RankError
from freewheel.host import Arrived, Fleet, Request, Scheduler, TextDelta, TextStream, Update
from freewheel.runtime import Executor
from freewheel.spec import FinishReason

MASK_SECONDS = 0.05
"""How long to wait at a time for a mask, where nothing else can be done."""


@dataclass(eq=False)
class Live:
    """A request that has not ended, its text so far, and its chunks that nobody has taken yet."""

    request: Request
    text: TextStream
    started: float
    chunks: deque[Chunk] = field(default_factory=deque[Chunk])
    arrivals: list[Arrival] = field(default_factory=list[Arrival])


class Session:
    """Not thread-safe: one thread adds, takes and aborts. Another may end all, or drop a reader.

    Any number of requests may be under way for any number of readers. Whoever waits for a chunk
    drives the rounds, which serve all; what comes for others waits for them.
    """

    def __init__(self, new_scheduler: Callable[[], Scheduler | Fleet], executor: Executor) -> None:
        self._new_scheduler = new_scheduler
        self._scheduler = new_scheduler()
        self._executor = executor
        self._live: dict[str, Live] = {}
        self.timeline = Timeline()
        self._had = 0.0  # when the last letter was here
        self._over = False
        self._turn = threading.RLock()  # of whoever changes something

    @property
    def scheduler(self) -> Scheduler | Fleet:
        """The one in charge now: an error in a round replaces it."""
        return self._scheduler

    @property
    def busy(self) -> bool:
        """Some request has not ended."""
        return bool(self._live)

    @property
    def computed(self) -> int:
        """Tokens of requests under way that are computed, as of the letters read."""
        return sum(live.request.lower for live in tuple(self._live.values()))

    def check(self, request: Request) -> None:
        """Raise RequestError if `request` could not be served."""
        self._scheduler.check(request)

    def add(self, request: Request, text: TextStream) -> Live:
        """Queue a request. Raises RequestError, and changes nothing, if it cannot be served."""
        live = Live(request, text, time.perf_counter())
        self.enter(live)
        return live

    def enter(self, live: Live) -> None:
        """Queue a request whose time counts from before. Raises what `add` raises."""
        self._scheduler.add(live.request)
        self._live[live.request.id] = live

    def chunks(self, live: Live) -> Iterator[Chunk]:
        """What comes for one request, up to its last chunk.

        Raises FreewheelError if the request was lost to an error in a round that another reader
        drove.
        """
        while True:
            while not live.chunks:
                if self._over:
                    raise ClosedError(f"{live.request.id} was dropped: the engine was closed")
                if self.ended(live):
                    raise FreewheelError(
                        f"{live.request.id} was dropped: an error or an interrupt ended a round"
                    )
                self.step()
            chunk = live.chunks.popleft()
            yield chunk
            if chunk.finish_reason is not None:
                return

    def close(self, request_ids: list[str]) -> None:
        """Abort those that have not ended; once none is left, read the letters still under way."""
        with self._turn:
            if not self._over:
                self._abort(request_ids)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._scheduler.abort(request_id)
            self._live.pop(request_id, None)
        while not self._live and self._executor.in_flight:
            self._scheduler.collect(self._executor.collect(), time.perf_counter())
        while not self._live and self._scheduler.moving:
            self._move(fresh=False, wait=True)
        if not self._live:
            self._move(fresh=False, wait=False)  # what nobody waits for begins, at least
            self.timeline.forget()

    def end(self) -> None:
        """Abort all, and read the letters still under way. Nothing more is served."""
        with self._turn:  # a round of another thread's is over
            with suppress(RankError):  # what was under way is lost with the rank
                self.close(list(self._live))
            self._over = True
            self._scheduler.lose()  # if a letter was lost
            self._live.clear()

    def ended(self, live: Live) -> bool:
        """Its last chunk is here, or it was lost."""
        return self._live.get(live.request.id) is not live

    def step(self) -> None:
        """One round's worth of progress. If it fails, every request is lost, but not the engine.

        Raises ClosedError after `end`.
        """
        with self._turn:
            if self._over:
                raise ClosedError("the engine was closed")
            whole = False
            try:
                self._advance()
                whole = True
            finally:
                if not whole:
                    self._start_anew()

    def _advance(self) -> None:
        """Launch a round if one can be, read a letter if one is due."""
        begun = time.perf_counter()
        for update in self._scheduler.failed():
            self._live[update.request.id].chunks.append(self._deliver(update))
        plan = self._scheduler.plan()
        if plan is not None:
            planned = time.perf_counter()
            self._executor.launch(plan)
            self.timeline.launched(plan, begun, planned, time.perf_counter())
        idle = plan is None and not self._executor.in_flight
        self._move(fresh=True, wait=idle and self._scheduler.moving > 0)
        if plan is not None and self._executor.in_flight <= self._scheduler.run_ahead:
            return
        if self._executor.in_flight:
            asked = time.perf_counter()
            letter = self._executor.collect()
            arrived = time.perf_counter()
            at = Arrived(self._executor.clock(), self._executor.beside(asked - self._had))
            self._had = arrived
            for update in self._scheduler.collect(letter, arrived, at):
                self._live[update.request.id].chunks.append(self._deliver(update))
            self.timeline.read(letter, asked, arrived, time.perf_counter())
        elif plan is None:
            self._scheduler.wait(MASK_SECONDS)

    def carry(self) -> None:
        """With no request under way: copies to and from host memory go on."""
        self._move(fresh=True, wait=self._scheduler.moving > 0)

    def _move(self, fresh: bool, wait: bool) -> None:
        """Start copies to and from host memory, behind the round, and hear of those that ended.

        `wait`: until one has; `fresh`: start also those that nothing waits for.
        """
        carrier = self._executor.carrier
        if not carrier.slots:
            return
        for transfer in self._scheduler.transfers(fresh):
            carrier.start(transfer)
        carrier.go_on()
        for result in carrier.wait() if wait else carrier.ended():
            self._scheduler.transferred(result)

    def _start_anew(self) -> None:
        """A round was left half done: forget all rows. Admission sets every value that one has."""
        self._scheduler.lose()
        self._live.clear()
        self.timeline.forget()
        self._scheduler = self._new_scheduler()
        while self._executor.in_flight:
            self._executor.collect()
        while self._executor.carrier.wait():
            pass

    def _deliver(self, update: Update) -> Chunk:
        live, now = self._live[update.request.id], time.perf_counter()
        before = len(update.request.output) - len(update.tokens)
        finish, delta = self._read(live, update)
        kept = update.tokens[: delta.tokens_used - before] if delta.stopped else update.tokens
        drafts_until = before + update.accepted
        if update.tokens:
            accepted = min(update.accepted, len(kept))
            live.arrivals.append(Arrival(now - live.started, len(kept), update.drafted, accepted))
        pieces = tuple(Piece(text, before <= at < drafts_until, at) for text, at in delta.pieces)
        logprobs = token_logprobs(update.request, before, len(kept))
        if finish is None:
            return Chunk(pieces, kept, None, None, logprobs)
        del self._live[update.request.id]
        prompt = prompt_logprobs(update.request)
        return Chunk(pieces, kept, finish, _metrics(live), logprobs, prompt)

    def _read(self, live: Live, update: Update) -> tuple[FinishReason | None, TextDelta]:
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


def _metrics(live: Live) -> Metrics:
    total = time.perf_counter() - live.started
    request, arrivals = live.request, live.arrivals
    return Metrics(
        prompt_tokens=len(request.prompt),
        cached_tokens=request.stats.cached_tokens,
        cached_host_tokens=request.stats.host_tokens,
        cached_disk_tokens=request.stats.disk_tokens,
        completion_tokens=len(request.output),
        drafted=request.stats.drafted,
        accepted=sum(arrival.accepted for arrival in arrivals),
        first_token_seconds=arrivals[0].seconds if arrivals else total,
        total_seconds=total,
        arrivals=tuple(arrivals),
        form=request.form,
    )
