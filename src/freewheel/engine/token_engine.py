# SPDX-License-Identifier: Apache-2.0
"""An engine for callers that live elsewhere: token ids in, token ids out, no text, no waiting."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from freewheel.engine.handoffs import HandoffLoad, Handoffs
from freewheel.engine.llm import LLM
from freewheel.engine.logprobs import prompt_logprobs
from freewheel.engine.output import Chunk, Logprobs
from freewheel.engine.session import Live
from freewheel.engine.tiers import DiskLoad, TierLoad, disk_load, tier_load
from freewheel.engine.timeline import RoundTimes
from freewheel.errors import RequestError
from freewheel.host import RequestState, TextStream
from freewheel.host.pages import IdPool
from freewheel.spec import FinishReason, Form, Handoff, SamplingParams
from freewheel.spec.violation import KINDS


@dataclass(frozen=True)
class PoolLoad:
    """free + cached + owned + quarantined = total, scratch left out."""

    name: str
    total: int
    free: int
    cached: int
    owned: int
    quarantined: int


@dataclass(frozen=True)
class CanaryLoad:
    """What a canary found changed, by kind; and the pages that it took out of use."""

    kv: int
    page_table: int
    tokens: int
    pages: int


@dataclass(frozen=True)
class Load:
    """What the engine is busy with, and what it has counted since it began."""

    running: int
    waiting: int
    tokens: int
    """Tokens in the rows of running requests."""
    rows: PoolLoad
    pages: tuple[PoolLoad, ...]
    rounds: int
    graph_launches: int
    late_captures: int
    host_reads: int | None
    """None without a guard, which alone can count them."""
    preemptions: int
    tiers: TierLoad | None = None
    """None where there are none."""
    device_forms: int = 0
    host_forms: int = 0
    disk: DiskLoad | None = None
    """None where there are no files."""
    canary: CanaryLoad | None = None
    """None where there is none."""
    handoffs: HandoffLoad | None = None
    """None without a role."""


@dataclass(frozen=True)
class TokenStep:
    """What one letter brought one request: `tokens`, the first `accepted` of `drafted` drafts.

    `queued_seconds`: how long it waited for a row, and `cached_tokens` of its prompt that were not
    computed, of these `cached_host_tokens` from host memory and `cached_disk_tokens` from files:
    set on its first step. `logprobs`: one for each token, if asked for.
    `prompt_logprobs`: on the first step with a token, if asked for. `picks`: likewise, of each
    layer that picks keys. `fault`: why it finished with an error, see `Request.fault`.
    """

    id: str
    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    finish: FinishReason | None
    queued_seconds: float | None
    cached_tokens: int | None = None
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    picks: tuple[tuple[int, ...], ...] | None = None
    fault: str = ""


@dataclass(eq=False)
class _Guest:
    """A request under way, how many of its arrivals were reported, and when it got a row."""

    id: str
    live: Live
    added: float
    reported: int = 0
    queued: float | None = None
    told: bool = False


class TokenEngine:
    """Drives the rounds of an LLM for requests named by the caller. One thread calls it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._session = llm._session
        self._guests: dict[str, _Guest] = {}
        self._preemptions = 0
        self._forms: Counter[str] = Counter()  # requests of a stated form, by who holds them to it
        self._handoffs: Handoffs | None = None
        if llm.config.role is not None:
            session = self._session
            self._handoffs = Handoffs(llm.config, llm.built, lambda: session.scheduler)

    @property
    def busy(self) -> bool:
        """There is something to step for."""
        return bool(self._guests) or (self._handoffs is not None and self._handoffs.busy)

    @property
    def kv_port(self) -> int:
        """Where other engines ask for prompts that this one computed; 0 where they do not."""
        return 0 if self._handoffs is None else self._handoffs.load.port

    def submit(  # noqa: PLR0913
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        cache_salt: str = "",
        form: Form | None = None,
        priority: int = 0,
        tenant: str = "",
        shows: bool = False,
        *,
        handoff: Handoff | None = None,
    ) -> None:
        """Queue a request. Raises RequestError, and changes nothing, if it cannot be served.

        `form`: what `form_of(params)` gave. Without it, a structure is compiled here, and the
        rounds of others wait for that. `priority`: the lower goes first; of equals, `tenant`s are
        served evenly. `shows`: with what the prompt's last token picks. `handoff`: who computes the
        prompt. An engine of role prefill does, for others, and ends the request with its first
        token; one of role decode queues it once the prompt's pages have come, or did not come in
        time.
        """
        if request_id in self._guests:
            raise RequestError("id", f"{request_id!r} is in use by a live request")
        handoffs = self._handoffs_for(handoff)
        if handoffs is not None and handoffs.computes:
            params = replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))
        whose = (cache_salt, form, priority, tenant, shows)
        request = self._llm._request(list(prompt), params, *whose)
        self._session.check(request)
        live = Live(request, TextStream(_no_text), time.perf_counter())
        if request.form is not None:
            self._forms[request.form] += 1
        self._guests[request_id] = _Guest(request_id, live, time.perf_counter())
        if handoff is None or handoffs is None:
            self._session.enter(live)
        elif handoffs.computes:
            self._session.enter(live)
            handoffs.promise(handoff.room, request)
        else:
            handoffs.fetch(handoff, request, partial(self._session.enter, live))

    def _handoffs_for(self, handoff: Handoff | None) -> Handoffs | None:
        """Who looks after it. Raises RequestError if this engine has no such role."""
        if handoff is None:
            return None
        if self._handoffs is None:
            raise RequestError("bootstrap_room", "this engine has no role: start it with --role")
        self._handoffs.check(handoff)
        return self._handoffs

    def form_of(self, params: SamplingParams) -> Form | None:
        """The compiled form of the structure that `params` asks for; None if it asks for none.

        It may take seconds, and may be called while another thread steps: but by one thread only.
        Raises RequestError for a structure that is refused.
        """
        return self._llm.form_of(params)

    def abort(self, request_id: str) -> None:
        """End a request now; nothing more comes of it. No effect if it has ended."""
        guest = self._guests.pop(request_id, None)
        if guest is not None:
            self._preemptions += guest.live.request.stats.preemptions
            if self._handoffs is not None:
                self._handoffs.leave(guest.live.request)
            self._session.close([guest.live.request.id])

    def flush_prefixes(self) -> None:
        """Forget the pages of ended requests; those of requests under way stay theirs."""
        for copy in self._session.scheduler.copies:
            prefix = copy.roster.reservations.prefix
            if prefix is not None:
                prefix.clear()

    def step(self) -> list[TokenStep]:
        """One round's worth of progress, for everybody."""
        if self._handoffs is not None:
            self._handoffs.step()
        if self._session.busy or self._handoffs is None:
            self._session.step()
            rests = not self._llm.executor.in_flight
            if self._handoffs is not None and self._handoffs.awaits and rests:
                self._handoffs.wait()  # others of its requests may wait for what comes
        else:
            self._session.carry()
            self._handoffs.wait()
        steps: list[TokenStep] = []
        for guest in list(self._guests.values()):
            if guest.queued is None and guest.live.request.state is not RequestState.WAITING:
                guest.queued = time.perf_counter() - guest.added
            steps += self._take(guest)
        if not self._guests:
            self._session.close([])  # reads the letters that are still on their way
        return steps

    def check_ranks(self) -> None:
        """Raise RankError if one of the engine's processes is known to be gone: an engine that
        rests would learn of it with the next request, which is then lost."""
        self._llm.executor.part.peers.check()

    def rounds(self) -> list[RoundTimes]:
        """Times of the rounds read since the last call."""
        return self._session.timeline.take()

    def load(self) -> Load:
        """How things stand."""
        rosters = [copy.roster for copy in self._session.scheduler.copies]
        reserved = [roster.reservations for roster in rosters]
        running = [request for roster in rosters for request in roster.running]
        counters, guard = self._llm.executor.counters, self._llm.config.guard
        live = sum(one.live.request.stats.preemptions for one in self._guests.values())
        return Load(
            running=len(running),
            waiting=sum(len(roster.waiting) for roster in rosters),
            tokens=sum(request.known for request in running),
            rows=_pool_load("rows", [one.rows for one in reserved]),
            pages=tuple(
                _pool_load(pools[0].group.name, pools)
                for pools in zip(*(one.pools for one in reserved), strict=True)
            ),
            rounds=counters.rounds,
            graph_launches=counters.graph_launches,
            late_captures=counters.late_captures,
            host_reads=len(self._llm.executor.sync_log.reads) if guard else None,
            preemptions=self._preemptions + live,
            device_forms=self._forms["device"],
            host_forms=self._forms["host"],
            tiers=tier_load(reserved, self._llm.executor.carrier),
            disk=disk_load(reserved, self._llm.executor.carrier),
            canary=self._canary(),
            handoffs=None if self._handoffs is None else replace(self._handoffs.load),
        )

    def _canary(self) -> CanaryLoad | None:
        alarm = self._llm.alarm
        if self._llm.config.watch is None:
            return None
        counts = {kind: alarm.counts[kind] for kind in KINDS.values()}
        return CanaryLoad(pages=alarm.pages, **counts)

    def _take(self, guest: _Guest) -> list[TokenStep]:
        steps: list[TokenStep] = []
        live = guest.live
        while live.chunks:
            chunk = live.chunks.popleft()
            steps.append(_step(guest, chunk))
            if chunk.finish_reason is not None:
                self._preemptions += live.request.stats.preemptions
                del self._guests[guest.id]
        return steps


def _step(guest: _Guest, chunk: Chunk) -> TokenStep:
    live, first = guest.live, not guest.told
    drafted = accepted = 0
    prompt = picks = None
    if chunk.token_ids:
        arrival = live.arrivals[guest.reported]
        drafted, accepted = arrival.drafted, arrival.accepted
        prompt = prompt_logprobs(live.request) if guest.reported == 0 else None
        picks = live.request.picks if live.request.shows else None
        guest.reported += 1
    guest.told = True
    return TokenStep(
        id=guest.id,
        tokens=chunk.token_ids,
        drafted=drafted,
        accepted=accepted,
        finish=chunk.finish_reason,
        queued_seconds=guest.queued if first else None,
        cached_tokens=live.request.stats.cached_tokens if first else None,
        cached_host_tokens=live.request.stats.host_tokens if first else 0,
        cached_disk_tokens=live.request.stats.disk_tokens if first else 0,
        logprobs=chunk.logprobs,
        prompt_logprobs=prompt,
        picks=picks,
        fault=live.request.fault,
    )


def _no_text(ids: Sequence[int], /) -> str:
    del ids
    return ""


def _pool_load(name: str, pools: Sequence[IdPool]) -> PoolLoad:
    """Of the pools that the model's copies have for the same thing, together."""
    return PoolLoad(
        name,
        total=sum(pool.total for pool in pools),
        free=sum(pool.free for pool in pools),
        cached=sum(pool.cached for pool in pools),
        owned=sum(pool.owned for pool in pools),
        quarantined=sum(pool.quarantined for pool in pools),
    )
