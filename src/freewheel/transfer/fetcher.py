# SPDX-License-Identifier: Apache-2.0
"""Fetches prompts that other engines have computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from freewheel.spec.handoff import Handoff, Piece, WireSettings
from freewheel.transfer.asking import Asker, ports_of
from freewheel.transfer.keys import Key
from freewheel.transfer.line import Line, WireError, connect
from freewheel.transfer.threads import Threads
from freewheel.transfer.wire import Pair, Wire

AT_ONCE = 64
"""Prompts that are waited for at one time; what comes on top begins to wait when one of them is
here."""


class Fetch:
    """One prompt on its way, or a rank's part of one. Whoever wants it asks, and answers `pieces`
    once: with `take`, or with `give_up`."""

    def __init__(self, until: float) -> None:
        """`until`: on time.monotonic."""
        self.until = until
        self.pieces: tuple[Piece, ...] | None = None
        """What the other engine has; None: not known yet."""
        self.ports: tuple[int, ...] = ()
        """Where its ranks that have this are read; known with `pieces`."""
        self.failure: str | None = None
        self.done = False
        """Nothing more comes: what was asked for is here, unless there is a `failure`."""
        self._pairs: Sequence[Pair] | None = None
        self._answered = threading.Event()

    def take(self, pairs: Sequence[Pair]) -> None:
        """Bring these; none to bring nothing, or no more than ranks have brought."""
        self._pairs = tuple(pairs)
        self._answered.set()

    def give_up(self) -> None:
        """Nothing is wanted any more; the other engine is not to take it for read."""
        self._answered.set()

    def wanted(self) -> Sequence[Pair]:
        """For the thread that fetches: what `take` said. Raises WireError."""
        if not self._answered.wait(self.until - time.monotonic()) or self._pairs is None:
            raise WireError("there was no room in time for what was fetched")
        return self._pairs


class Fetcher:
    """A few threads, each with one prompt, and as many, each with a rank's part of one."""

    def __init__(
        self,
        wire: Wire,
        layout: str,
        settings: WireSettings,
        awake: Callable[[], None],
        key: Key | None = None,
    ) -> None:
        """`awake` is called whenever a fetch has changed. `key`: what the others must have."""
        self._asker = Asker(wire, layout, key)
        self._settings, self._awake = settings, awake
        self._threads = Threads(AT_ONCE, "fetch")
        self._carriers = Threads(AT_ONCE, "carry")

    def begin(self, handoff: Handoff, first: int) -> Fetch:
        """Fetch the prompt's blocks from the `first` on. The time that it may take begins now."""
        fetch = Fetch(time.monotonic() + self._settings.seconds)
        source = handoff.source
        assert source is not None
        self._threads.submit(
            lambda: self._run(fetch, lambda: self._fetch(fetch, source, handoff.room, first))
        )
        return fetch

    def bring(
        self, source: tuple[str, int], room: str, pairs: Sequence[Pair], seconds: float
    ) -> Fetch:
        """Copy slots from one rank of the other engine, for a prompt that `begin` asked for."""
        fetch = Fetch(time.monotonic() + seconds)
        own = tuple(pairs)
        self._carriers.submit(
            lambda: self._run(fetch, lambda: self._asker.bring(source, room, own, fetch.until))
        )
        return fetch

    def close(self) -> None:
        for threads in (self._threads, self._carriers):
            threads.close()

    def _run(self, fetch: Fetch, work: Callable[[], None]) -> None:
        # Until it is known that everything came, nothing did.
        fetch.failure = "fetching it ended in an error of this engine's own"
        try:
            work()
            fetch.failure = None
        except WireError as error:
            fetch.failure = str(error)
        finally:
            fetch.done = True
            self._awake()

    def _fetch(self, fetch: Fetch, source: tuple[str, int], room: str, first: int) -> None:
        line = connect(*source, fetch.until)
        try:
            self._bring(line, fetch, source, room, first)
        finally:
            line.close()

    def _bring(
        self, line: Line, fetch: Fetch, source: tuple[str, int], room: str, first: int
    ) -> None:
        told = self._asker.ask(line, room, first)
        fetch.ports = ports_of(source, told, self._settings)
        fetch.pieces = told.pieces
        self._awake()
        pairs = fetch.wanted()
        if pairs and told.ranks[0]:  # another process has them, and this line holds them there
            self._asker.bring((source[0], fetch.ports[0]), room, pairs, fetch.until)
            pairs = ()
        self._asker.wire.read(line, told.card, pairs, room)
