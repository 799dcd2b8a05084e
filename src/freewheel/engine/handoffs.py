# SPDX-License-Identifier: Apache-2.0
"""Prompts that this engine computes for others, or that others have computed for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from freewheel.config import EngineConfig
from freewheel.errors import RequestError
from freewheel.host import Arriving, Parcels, Request, Scheduler
from freewheel.host.tier import Kept
from freewheel.runtime import Built
from freewheel.spec import FinishReason, Handoff
from freewheel.transfer import Fetch, Fetcher, Pair, Post, open_wire, read_key

log = logging.getLogger("freewheel.handoffs")

PATIENCE = 0.005
"""Seconds to wait at a time where nothing else is to be done."""

QUIET = 10.0
"""Seconds in which one peer's failures for one reason are told once."""

MOST_TOLD = 256
"""Failures that are remembered as told; a router may name any number of ports."""

Copies = Callable[[], tuple[Scheduler, ...]]


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
    """A prompt for others, from its request to its parcel; `until`: when that is late."""

    room: str
    request: Request
    until: float | None = None


@dataclass(frozen=True)
class _Offer:
    """Blocks that are held for whoever comes before `until`."""

    held: list[Kept]
    until: float


@dataclass(eq=False)
class _Awaited:
    """A request that is queued once its pages came. `first`: of its blocks that are fetched."""

    source: tuple[str, int] | None
    request: Request
    enter: Callable[[], None]
    first: int
    fetch: Fetch
    blocks: list[Arriving] | None = None


class Handoffs:
    """One of an engine with a role. Its thread calls; nothing here waits for another engine.

    Raises ConfigError if nobody can listen where it is to listen, or there is no such wire or key.
    """

    def __init__(self, config: EngineConfig, built: Built, copies: Copies) -> None:
        """`copies`: the scheduler in charge, as the model's copies."""
        self._copies, self._mover, self._settings = copies, built.executor.mover, config.wire
        self.load = HandoffLoad()
        self._awake = threading.Event()
        self._promised: list[_Promise] = []
        self._offers: dict[str, _Offer] = {}  # the oldest first
        self._awaited: list[_Awaited] = []
        self._at = self._parcels()
        key = read_key(config.kv_key_file)
        wire = open_wire(config.kv_wire, self._mover)
        own = (wire, layout_of(built), self._settings, self._awake.set, key)
        self._post = Post(*own) if config.role == "prefill" else None
        fetches = config.role == "decode"
        self._fetcher = Fetcher(wire, self._mover, *own[1:]) if fetches else None
        self.load.port = 0 if self._post is None else self._post.port
        self.load.wire = wire.name
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
        """Raise RequestError if this engine cannot do its part."""
        if self._post is not None:
            return
        if handoff.source is None:
            raise RequestError("bootstrap_host", "a decode engine must be told whom to ask")
        host, port = handoff.source
        if not self._settings.may_fetch_from(host, port):
            raise RequestError(
                "bootstrap_host",
                f"{host!r}, port {port}, is no peer of this engine; allow it with --kv-peer",
            )

    def promise(self, room: str, request: Request) -> None:
        """Others will come for this request's prompt."""
        self._promised.append(_Promise(room, request))

    def fetch(self, handoff: Handoff, request: Request, enter: Callable[[], None]) -> None:
        """Call `enter`, which queues the request, once its pages are here, or never will be."""
        self._follow()
        assert self._fetcher is not None
        first, most = self._at.wanted(request)
        fetch = self._fetcher.begin(handoff, first)
        if first < most:
            self._awaited.append(_Awaited(handoff.source, request, enter, first, fetch))
            return
        fetch.take(())  # the other engine is to know that nobody will come
        enter()

    def leave(self, request: Request) -> None:
        """It is not to be queued any more: what comes for it is kept for others."""
        for one in self._awaited:
            if one.request is request:
                one.enter = _nothing

    def step(self) -> None:
        """Take note of what has come, and of what is ready to go."""
        self._awake.clear()
        self._follow()
        self._promised = [one for one in self._promised if not self._offered(one)]
        for room, read in [] if self._post is None else self._post.taken():
            self.load.read += read
            self.load.dropped += not read
            if room in self._offers:
                self._at.release(self._offers.pop(room).held)
        self._awaited = [one for one in self._awaited if not self._entered(one)]

    def wait(self) -> None:
        """For something to come, a little while."""
        self._awake.wait(PATIENCE)

    def _follow(self) -> None:
        """An error in a round replaces the scheduler, and with it all that was known of slots."""
        now = self._parcels()
        if now != self._at:
            self._at = now
            for one in self._promised:
                self._refuse(one, "its engine began anew")
            self._promised, self._awaited = [], []
            self._offers.clear()

    def _parcels(self) -> Parcels:
        (copy,) = self._copies()
        reserved = copy.roster.reservations
        assert reserved.prefix is not None and reserved.moves is not None, "a role has host memory"
        return Parcels(reserved.prefix, reserved.moves)

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
        parcels = self._at
        held = parcels.pack(one.request, late=now > one.until)
        if held is None:
            return False
        if one.room in self._offers:
            parcels.release(self._offers.pop(one.room).held)
        self._offers[one.room] = _Offer(held, now + self._settings.seconds)
        where = [self._mover.address(kept.slot) for kept in held]
        self._post.offer(one.room, parcels.pieces(one.request, held, where))
        self.load.offered += 1
        return True

    def _refuse(self, one: _Promise, why: str) -> None:
        if self._post is not None:
            self._post.refuse(one.room, why)

    def _entered(self, one: _Awaited) -> bool:
        """Whether its request has gone on, with pages or without."""
        fetch = one.fetch
        if not fetch.done:
            if fetch.pieces is not None and one.blocks is None:
                one.blocks = self._at.expect(one.request, one.first, fetch.pieces)
                fetch.take([Pair(b.kept.slot, b.piece.slot, b.piece.address) for b in one.blocks])
            return False
        whole, blocks = fetch.failure is None, one.blocks or []
        for block in blocks if whole else ():
            self._mover.relabel(block.kept.slot, block.piece.label, block.label)
        self._at.arrived(blocks, whole)
        self.load.fetched += whole
        self.load.failed += not whole
        self.load.failure = fetch.failure or self.load.failure
        self.load.blocks += len(blocks) if whole else 0
        if fetch.failure is not None and one.source is not None:
            self._failures.tell(one.source, fetch.failure, time.monotonic())
        one.enter()
        return True


def _nothing() -> None: ...


def layout_of(built: Built) -> str:
    """A digest of what a slot holds: engines of one are engines of one model and one cache."""
    spec, resolved = built.spec, built.resolved
    what = (spec.family, spec.vocab_size, spec.layers, spec.hidden_size, resolved.drafter == "mtp")
    return blake2b(repr((what, built.groups)).encode(), digest_size=16).hexdigest()
