# SPDX-License-Identifier: Apache-2.0
"""Replays a trace: the engine's own scheduler, pages and prefix cache, on a clock of its own."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, islice
from operator import add
from typing import NamedTuple

from freewheel.errors import FreewheelError, RequestError
from freewheel.host import Request, Scheduler
from freewheel.simulate.device import StubDevice
from freewheel.simulate.lean import LeanScheduler, Stride
from freewheel.simulate.luck import LOTS
from freewheel.simulate.plan import Simulation
from freewheel.simulate.script import Script, ScriptNames
from freewheel.simulate.trace import Call, Trace
from freewheel.spec import SamplingParams, StepResult


@dataclass
class PoolUse:
    """Pages of one group over time; `seconds` of simulated time stand behind the sums."""

    name: str
    total: int
    owned: int = 0
    held: int = 0
    peak_owned: int = 0
    peak_held: int = 0
    owned_seconds: float = 0.0
    held_seconds: float = 0.0
    since: float = 0.0

    def count(self, owned: int, held: int, now: float) -> None:
        """So many from now on. The sums are then as of now, if that changes anything."""
        if (owned, held) != (self.owned, self.held):
            self.owned_seconds += self.owned * (now - self.since)
            self.held_seconds += self.held * (now - self.since)
            self.owned, self.held, self.since = owned, held, now
            self.peak_owned = max(self.peak_owned, owned)
            self.peak_held = max(self.peak_held, held)


@dataclass
class Outcome:
    """What happened. Times in simulated seconds, one entry for each request that was served."""

    pools: list[PoolUse]
    first_token: list[float] = field(default_factory=list[float])
    per_token: list[float] = field(default_factory=list[float])
    whole: list[float] = field(default_factory=list[float])
    refused: dict[str, int] = field(default_factory=dict[str, int])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    preemptions: int = 0
    prompt_rounds: int = 0
    decode_rounds: int = 0
    busy_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Of the prompts' tokens, the share that was found."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Flight(NamedTuple):
    """A round on its way: its letter, and when that is there."""

    result: StepResult | Stride
    done: float


class Replay:
    """One run of a trace. The host takes no time; the device runs round after round.

    As in the engine: a round is launched as soon as the scheduler has one and few enough are in
    flight; otherwise the host sleeps until the oldest letter comes, and sees then what has arrived
    meanwhile. With nothing to do it wakes for the next arrival.
    """

    def __init__(self, plan: Simulation, trace: Trace, every_round: bool = False) -> None:
        """`every_round`: plan each, whether or not something is to be decided: slower."""
        self.scheduler: Scheduler = plan.scheduler(Scheduler if every_round else LeanScheduler)
        self.now = 0.0
        self._plan, self._calls = plan, trace.calls
        self._script = Script(trace.block)
        # of shares given for more drafts than are made, those beyond would count as right
        shares = plan.acceptance[: plan.config.depth]
        self._device = StubDevice(
            trace.calls, self._script, shares, plan.cost, plan.context_len, plan.seed
        )
        self._lean = self.scheduler if isinstance(self.scheduler, LeanScheduler) else None
        if self._lean is not None:
            self._lean.open(self._device)
            prefix = self._lean.roster.reservations.prefix
            if prefix is not None:
                prefix.names = ScriptNames(trace.calls, trace.block, prefix.block_size)
        self._params: dict[int, SamplingParams] = {}
        self._next = 0
        self._free_at = 0.0
        self._flights: deque[Flight] = deque()
        self._letters = 0  # of them, those that are no strides
        pools = self.scheduler.roster.reservations.pools
        self._pools = pools
        self._outcome = Outcome([PoolUse(pool.group.name, pool.total) for pool in pools])

    def run(self) -> Outcome:
        """To the last answer. Raises FreewheelError if pages are missing at the end."""
        while self.step():
            pass
        self._outcome.seconds = self.now
        for use in self._outcome.pools:
            use.count(0, 0, self.now)
        for pool in self._pools:
            if pool.free + pool.cached != pool.total:
                raise FreewheelError(f"{pool.name}: {pool.owned} are still owned at the end")
        self.scheduler.roster.reservations.check()
        return self._outcome

    def step(self) -> bool:
        """Launch a round, or read a letter, or wait for an arrival. False once all is done."""
        self._arrive()
        if self._lean is not None and self._rush(self._lean):
            return True
        ahead = self._plan.config.run_ahead
        if len(self._flights) <= ahead and self._launch() and len(self._flights) <= ahead:
            return True
        if self._flights:
            self._collect()
            return True
        if self._next < len(self._calls):
            self._pass_to(self._calls[self._next].arrival)
            return True
        return False

    def _arrive(self) -> None:
        while self._next < len(self._calls) and self._calls[self._next].arrival <= self.now:
            number, self._next = self._next, self._next + 1
            call = self._calls[number]
            try:
                self.scheduler.add(self._request(number, call))
            except RequestError as error:
                refused = self._outcome.refused
                refused[error.field] = refused.get(error.field, 0) + 1

    def _request(self, number: int, call: Call) -> Request:
        return Request(
            f"{number}",
            # nobody reads tokens where blocks are known by ids
            self._script.prompt(call) if self._lean is None else range(call.prompt),
            self._asked(call.answer),
            number,
            self._plan.context_len,
            priority=call.priority,
            tenant=call.tenant,
        )

    def _asked(self, tokens: int) -> SamplingParams:
        found = self._params.get(tokens)
        if found is None:
            found = self._params[tokens] = SamplingParams(max_tokens=tokens)
        return found

    def _launch(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        if isinstance(plan, Stride):
            result, seconds = plan, plan.seconds
        else:
            result, seconds = self._device.execute(plan)
            self._letters += 1
        self._ran(seconds)
        self._flights.append(Flight(result, self._free_at))
        if plan.shape.for_prompts:
            self._outcome.prompt_rounds += 1
        else:
            self._outcome.decode_rounds += 1
        return True

    def _rush(self, lean: LeanScheduler) -> bool:
        """Rounds up to the next in which something is to be decided; whether there are any."""
        if len(self._flights) != lean.run_ahead or self._letters:
            return False
        count, letters = lean.ahead()
        if not count:
            return False
        if lean.changed:
            self._count_pages(self.now)
        until = self._calls[self._next].arrival if self._next < len(self._calls) else math.inf
        begin = max(self._free_at, self.now)
        count = min(count, self._rounds_until(until, begin, lean))
        seconds = lean.seconds(count)
        done = [flight.done for flight in self._flights]
        done += islice(accumulate(seconds, initial=begin), 1, None)
        # each is launched when the letter before was read, and no later than somebody comes
        count = min(count, 1 + bisect_left(done, until))
        moments = [self.now, *done]
        count, read = lean.pass_by(
            count, min(count, letters), lambda read: self._count_pages(moments[read])
        )
        self._outcome.busy_seconds = reduce(add, seconds[:count], self._outcome.busy_seconds)
        self._outcome.decode_rounds += count
        done = done[: len(self._flights) + count]
        self._free_at, self.now = done[-1], moments[read]
        for _ in range(min(read, len(self._flights))):
            self._flights.popleft()
        new = lean.passed(seconds[:count], read)
        self._flights += map(Flight, new, done[len(done) - len(new) :])
        return True

    def _rounds_until(self, until: float, begin: float, lean: LeanScheduler) -> int:
        """More rounds than these need not be looked at: somebody comes. At least one."""
        (each,) = lean.seconds(1)
        if until == math.inf or not each:
            return LOTS
        return max(1, min(LOTS, int((until - begin) / each) + 2))

    def _ran(self, seconds: float) -> None:
        """The device is busy for so long, from now on or behind what it does."""
        self._free_at = max(self._free_at, self.now) + seconds
        self._outcome.busy_seconds += seconds

    def _collect(self) -> None:
        flight = self._flights.popleft()
        self._pass_to(flight.done)
        if isinstance(flight.result, Stride):
            assert self._lean is not None, "nobody else makes strides"
            for request in self._lean.read(flight.result):
                self._note(request)
            return
        self._letters -= 1
        for update in self.scheduler.collect(flight.result, self.now):
            if update.finish is not None:
                self._note(update.request)

    def _pass_to(self, moment: float) -> None:
        """Time passes; what is held now is held until then."""
        if self._lean is None or self._lean.changed:
            self._count_pages(self.now)
        self.now = moment

    def _count_pages(self, moment: float) -> None:
        """They are held as they are now from that moment on."""
        for pool, use in zip(self._pools, self._outcome.pools, strict=True):
            owned = pool.owned
            use.count(owned, owned + pool.cached, moment)
        if self._lean is not None:
            self._lean.changed = False

    def _note(self, request: Request) -> None:
        """A request has ended."""
        outcome, stats = self._outcome, request.stats
        arrival, first = self._calls[request.seed].arrival, stats.first_token_time
        assert first is not None, "an answer has at least one token"
        outcome.first_token.append(first - arrival)
        outcome.whole.append(self.now - arrival)
        if len(request.output) > 1:
            outcome.per_token.append((self.now - first) / (len(request.output) - 1))
        outcome.prompt_tokens += len(request.prompt)
        outcome.cached_tokens += stats.cached_tokens
        outcome.answer_tokens += len(request.output)
        outcome.preemptions += stats.preemptions
