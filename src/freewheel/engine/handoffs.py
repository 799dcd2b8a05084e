# SPDX-License-Identifier: Apache-2.0
"""Prompts that this engine computes for others, or that others have computed for it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from freewheel.config import EngineConfig
from freewheel.errors import RequestError
from freewheel.host import Arriving, Fleet, Parcels, Request, Scheduler
from freewheel.host.tier import Kept
from freewheel.runtime import Built
from freewheel.spec import FinishReason, Handoff
from freewheel.spec.errand import Bring, Oblivion, Offer, Opening, Trip, Withdrawal
from freewheel.transfer import Fetch, Pair

log = logging.getLogger("freewheel.handoffs")

PATIENCE = 0.005
"""Seconds to wait at a time where nothing else is to be done."""

QUIET = 10.0
"""Seconds in which one peer's failures for one reason are told once."""

MOST_TOLD = 256
"""Failures that are remembered as told; a router may name any number of ports."""


@dataclass
class HandoffLoad:
    """Prompts since the engine began. `port`: where they are asked for; 0 where they are not.
    `wire`: by what pages go.

    Of a prefill engine: `offered`, of these `read`, and `dropped` since nobody came in time. Of a
    decode engine: `fetched`, `blocks` of them, and `failed`, of which `failure` says the last.
    """

    port: int = 0
    wire: str = ""
    offered: int = 0
    read: int = 0
    dropped: int = 0
    fetched: int = 0
    blocks: int = 0
    failed: int = 0
    failure: str = ""


class Failures:
    """Tells the log of prompts that did not come, but not of each."""

    def __init__(self) -> None:
        self._told: dict[tuple[tuple[str, int], str], tuple[float, int]] = {}  # the oldest first

    def tell(self, peer: tuple[str, int], why: str, now: float) -> None:
        """One has failed, at `now` in seconds: the first of its peer and reason is told, and then
        one in QUIET seconds, with the number of those between. `why` may be the peer's words."""
        at, untold = self._told.get((peer, why), (now - QUIET, 0))
        if now - at < QUIET:
            self._told[peer, why] = at, untold + 1
            return
        self._told.pop((peer, why), None)
        if len(self._told) >= MOST_TOLD:
            del self._told[next(iter(self._told))]
        self._told[peer, why] = now, 0
        log.warning(
            "handoff: a prompt did not come from %s:%d, so it is computed here: %s%s",
            *peer,
            "".join(letter if letter.isprintable() else "?" for letter in why),
            f" ({untold} more since the last line)" if untold else "",
        )


@dataclass(eq=False)
class _Promise:
    """A prompt for others, from its request to its parcel; `until`: when that is late. `copy`: of
    the model, the one that computes it."""

    room: str
    request: Request
    copy: int
    until: float | None = None


@dataclass(frozen=True)
class _Offer:
    """Blocks of a copy of the model that are held for whoever comes before `until`."""

    copy: int
    held: list[Kept]
    until: float


@dataclass(eq=False)
class _Awaited:
    """A request that is queued once its pages came. `copy`: of the model, the one that will serve
    it. `first`: of its blocks that are fetched. `number`: of the errand of ranks that bring them,
    if there is one."""

    handoff: Handoff
    request: Request
    enter: Callable[[], None]
    copy: int
    first: int
    fetch: Fetch
    blocks: list[Arriving] | None = None
    number: int | None = None
    failure: str | None = None


class Handoffs:
    """One of an engine with a role. Its thread calls; nothing here waits for another engine.

    Raises ConfigError if nobody can listen where it is to listen, or there is no such wire or key,
    on any of its ranks.
    """

    def __init__(
        self, config: EngineConfig, built: Built, scheduler: Callable[[], Scheduler | Fleet]
    ) -> None:
        """`scheduler`: the one in charge."""
        assert config.role is not None, "an engine with a role"
        self._scheduler, self._settings = scheduler, config.wire
        self._part, self._mover = built.executor.part, built.executor.mover
        self._alone = self._part.mesh.alone
        self._awake = threading.Event()
        self._promised: list[_Promise] = []
        self._offers: dict[str, _Offer] = {}  # the oldest first
        self._awaited: list[_Awaited] = []
        self._at = self._parcels()
        self._numbers = itertools.count()
        self._brought: dict[int, str | None] = {}
        opening = Opening(config.role, layout_of(built), self._settings)
        self._ports = self._part.open_errands(opening, self._awake.set)
        own = self._part.errands
        assert own is not None, "they were opened"
        self._post, self._fetcher = own.post, own.fetcher
        self.load = HandoffLoad(port=own.port, wire=own.wire.name)
        self._failures = Failures()

    @property
    def busy(self) -> bool:
        """Something is to be looked after."""
        if self._promised or self._awaited:
            return True
        oldest = next(iter(self._offers.values()), None)
        return oldest is not None and (self._awake.is_set() or time.monotonic() > oldest.until)

    @property
    def awaits(self) -> bool:
        """Pages are on their way here."""
        return bool(self._awaited)

    @property
    def computes(self) -> bool:
        """Prompts, for others: their requests need no more than a first token."""
        return self._post is not None

    def check(self, handoff: Handoff) -> None:
        """Raise RequestError if this engine cannot do its part.

        A server has asked the same, and has named the field that its client sent.
        """
        if self._post is not None:
            return
        if handoff.source is None:
            raise RequestError("handoff", "a decode engine must be told whom to ask")
        if (why := self._settings.why_not_from(*handoff.source)) is not None:
            raise RequestError("handoff", why)

    def promise(self, room: str, request: Request) -> None:
        """Others will come for the prompt of this request, which was queued."""
        self._follow()
        scheduler = self._scheduler()
        copy = scheduler.home(request.id) if isinstance(scheduler, Fleet) else 0
        self._promised.append(_Promise(room, request, copy))

    def fetch(self, handoff: Handoff, request: Request, enter: Callable[[], None]) -> None:
        """Call `enter`, which queues the request, once its pages are here, or never will be."""
        self._follow()
        assert self._fetcher is not None
        scheduler = self._scheduler()
        copy = scheduler.assign(request) if isinstance(scheduler, Fleet) else 0
        first, most = self._at[copy].wanted(request)
        fetch = self._fetcher.begin(handoff, first)
        if first < most:
            self._awaited.append(_Awaited(handoff, request, enter, copy, first, fetch))
            return
        fetch.take(())  # the other engine is to know that nobody will come
        enter()

    def leave(self, request: Request) -> None:
        """It is not to be queued any more: what comes for it is kept for others."""
        for one in self._awaited:
            if one.request is request:
                self._release(request)
                one.enter = _nothing

    def step(self) -> None:
        """Take note of what has come, and of what is ready to go."""
        self._awake.clear()
        self._follow()
        self._brought.update(self._part.arrivals.ended())
        self._promised = [one for one in self._promised if not self._offered(one)]
        for room, read in [] if self._post is None else self._post.taken():
            self.load.read += read
            self.load.dropped += not read
            self._take_back(room)
        self._awaited = [one for one in self._awaited if not self._entered(one)]

    def wait(self) -> None:
        """For something to come, a little while."""
        self._awake.wait(PATIENCE)

    def _follow(self) -> None:
        """An error in a round replaces the scheduler, and with it all that was known of slots."""
        now = self._parcels()
        if now == self._at:
            return
        self._at = now
        for one in self._promised:
            self._refuse(one, "its engine began anew")
        for one in self._awaited:
            one.fetch.give_up()
        for room, offer in self._offers.items():
            self._withdraw(room, offer.copy)
        self._promised, self._awaited = [], []
        self._offers.clear()
        self._brought.clear()
        self._part.arrivals.forget()
        self._part.send(Oblivion(), own=True)

    def _parcels(self) -> list[Parcels]:
        """Of each copy of the model."""
        found: list[Parcels] = []
        for copy in self._scheduler().copies:
            reserved = copy.roster.reservations
            assert reserved.prefix is not None and reserved.moves is not None, "of a role"
            found.append(Parcels(reserved.prefix, reserved.moves))
        return found

    def _offered(self, one: _Promise) -> bool:
        """Whether its prompt is in its room, or never will be."""
        assert self._post is not None
        if one.request.finish is None:
            return False
        if one.request.finish in (FinishReason.ABORT, FinishReason.ERROR):
            self._refuse(one, f"its request ended as {one.request.finish}")
            return True
        now = time.monotonic()
        one.until = now + self._settings.seconds if one.until is None else one.until
        parcels = self._at[one.copy]
        held = parcels.pack(one.request, late=now > one.until)
        if held is None:
            return False
        self._take_back(one.room)
        self._offers[one.room] = _Offer(one.copy, held, now + self._settings.seconds)
        slots = tuple(kept.slot for kept in held)
        self._part.send(Offer(one.copy, one.room, slots), own=False)  # this rank's follows
        where = [self._mover.address(slot) for slot in slots]
        pieces = parcels.pieces(one.request, held, where)
        self._post.offer(one.room, pieces, self._ranks_of(one.copy))
        self.load.offered += 1
        return True

    def _ranks_of(self, copy: int) -> list[int]:
        """Those of a copy of the model, as steps from the port of rank 0 to theirs."""
        first = copy * self._part.mesh.tp
        return [port - self._ports[0] for port in self._ports[first : first + self._part.mesh.tp]]

    def _take_back(self, room: str) -> None:
        """What is held for the room, if anything, is held no longer."""
        offer = self._offers.pop(room, None)
        if offer is not None:
            self._withdraw(room, offer.copy)
            self._at[offer.copy].release(offer.held)

    def _withdraw(self, room: str, copy: int) -> None:
        self._part.send(Withdrawal(copy, room), own=True)

    def _refuse(self, one: _Promise, why: str) -> None:
        if self._post is not None:
            self._post.refuse(one.room, why)

    def _release(self, request: Request) -> None:
        scheduler = self._scheduler()
        if isinstance(scheduler, Fleet):
            scheduler.release(request.id)

    def _bring(self, one: _Awaited, blocks: Sequence[Arriving]) -> None:
        """Have these copied into their slots, on every rank of the copy."""
        if self._alone or not blocks:
            one.fetch.take([Pair(b.kept.slot, b.piece.slot, b.piece.address) for b in blocks])
            return
        source, number = one.handoff.source, next(self._numbers)
        assert source is not None
        trips = (Trip(b.kept.slot, b.piece.slot, b.label - b.piece.label) for b in blocks)
        left = one.fetch.until - time.monotonic()
        where = (one.handoff.room, source[0], one.fetch.ports)
        one.number = number
        self._part.arrivals.begin(number)
        self._part.send(Bring(number, one.copy, *where, tuple(trips), left), own=True)

    def _came(self, one: _Awaited) -> bool:
        """Whether nothing more comes of it; then `fetch.failure` says why, if not all is here."""
        if one.number is None:
            return one.fetch.done
        if one.number not in self._brought:
            return False
        failure = self._brought.pop(one.number)
        if failure is None:
            one.fetch.take(())  # the other engine is to know that all was read
        else:
            one.fetch.give_up()
        one.failure = failure
        return True

    def _entered(self, one: _Awaited) -> bool:
        """Whether its request has gone on, with pages or without."""
        fetch = one.fetch
        if fetch.pieces is not None and one.blocks is None and not fetch.done:
            one.blocks = self._at[one.copy].expect(one.request, one.first, fetch.pieces)
            self._bring(one, one.blocks)
            return False
        if not self._came(one):
            return False
        failure, blocks = one.failure if one.number is not None else fetch.failure, one.blocks or []
        whole = failure is None
        if self._alone and whole:
            for block in blocks:
                self._mover.relabel(block.kept.slot, block.piece.label, block.label)
        self._at[one.copy].arrived(blocks, whole)
        self._count(one, failure, len(blocks))
        if not whole:
            self._release(one.request)
        one.enter()
        return True

    def _count(self, one: _Awaited, failure: str | None, blocks: int) -> None:
        self.load.fetched += failure is None
        self.load.failed += failure is not None
        self.load.failure = failure or self.load.failure
        self.load.blocks += blocks if failure is None else 0
        if failure is not None and one.handoff.source is not None:
            self._failures.tell(one.handoff.source, failure, time.monotonic())


def _nothing() -> None: ...


def layout_of(built: Built) -> str:
    """A digest of what a slot holds: engines of one are engines of one model and one cache."""
    spec, resolved = built.spec, built.resolved
    what = (spec.family, spec.vocab_size, spec.layers, spec.hidden_size, resolved.drafter == "mtp")
    return blake2b(repr((what, built.groups)).encode(), digest_size=16).hexdigest()
