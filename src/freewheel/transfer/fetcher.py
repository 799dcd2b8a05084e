# SPDX-License-Identifier: Apache-2.0
"""Fetches prompts that other engines have computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from freewheel.spec.handoff import Handoff, Piece, WireSettings
from freewheel.transfer.keys import Key
from freewheel.transfer.line import Line, WireError, connect
from freewheel.transfer.wire import Memory, Pair, Wire

AT_ONCE = 64
"""Prompts that are waited for at one time; what comes on top begins to wait when one of them is
here."""


class Fetch:
    """One prompt on its way. The engine's thread asks, and answers `pieces` once with `take`."""

    def __init__(self) -> None:
        self.pieces: tuple[Piece, ...] | None = None
        """What the other engine has; None: not known yet."""
        self.failure: str | None = None
        self.done = False
        """Nothing more comes: what was asked for is here, unless there is a `failure`."""
        self._pairs: Sequence[Pair] | None = None
        self._answered = threading.Event()

    def take(self, pairs: Sequence[Pair]) -> None:
        """Bring these; none to bring nothing."""
        self._pairs = tuple(pairs)
        self._answered.set()

    def wanted(self, until: float) -> Sequence[Pair]:
        """For the thread that fetches: what `take` said. Raises WireError."""
        if not self._answered.wait(until - time.monotonic()) or self._pairs is None:
            raise WireError("there was no room in time for what was fetched")
        return self._pairs


class Fetcher:
    """A few threads, each with one prompt."""

    def __init__(
        self,
        wire: Wire,
        memory: Memory,
        layout: str,
        settings: WireSettings,
        awake: Callable[[], None],
        key: Key | None = None,
    ) -> None:
        """`awake` is called whenever a fetch has changed. `key`: what the others must have."""
        self._key = key
        self._wire, self._memory, self._layout = wire, memory, layout
        self._settings, self._awake = settings, awake
        self._threads = ThreadPoolExecutor(AT_ONCE, "fetch")

    def begin(self, handoff: Handoff, first: int) -> Fetch:
        """Fetch the prompt's blocks from the `first` on. The time that it may take begins now."""
        fetch, until = Fetch(), time.monotonic() + self._settings.seconds
        self._threads.submit(self._fetch, fetch, handoff, first, until)
        return fetch

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, fetch: Fetch, handoff: Handoff, first: int, until: float) -> None:
        assert handoff.source is not None
        line: Line | None = None
        # Until it is known that everything came, nothing did.
        fetch.failure = "fetching it ended in an error of this engine's own"
        try:
            line = connect(*handoff.source, until)
            self._bring(line, fetch, handoff.room, first)
            fetch.failure = None
        except WireError as error:
            fetch.failure = str(error)
        finally:
            if line is not None:
                line.close()
            fetch.done = True
            self._awake()

    def _bring(self, line: Line, fetch: Fetch, room: str, first: int) -> None:
        if self._key is not None:
            self._key.meet(line)
        own = {"layout": self._layout, "wire": self._wire.name}
        line.say({"room": room, "first": first, **own})
        told = line.hear()
        if "refused" in told:
            raise WireError(f"the other engine: {told['refused']}")
        fetch.pieces = _pieces(told.get("pieces"))
        self._awake()
        self._wire.read(line, _card(told.get("card")), fetch.wanted(line.until), room)


def _pieces(told: Any) -> tuple[Piece, ...]:
    """Raises WireError for anything else."""
    kinds = {one.name: one.type for one in fields(Piece)}
    types = {"int": int, "bool": bool, "str": str}
    words = [name for name, kind in kinds.items() if kind == "int"]
    if not isinstance(told, list):
        raise WireError("the other engine named no blocks")
    for one in told:
        if not isinstance(one, dict) or one.keys() != kinds.keys():
            raise WireError("the other engine named something that is no block")
        if any(type(one[name]) is not types[str(kind)] for name, kind in kinds.items()):
            raise WireError("the other engine named a block that is none")
        if not all(0 <= one[name] < 1 << 63 for name in words):
            raise WireError("the other engine named a block beyond all memory")
    return tuple(Piece(**one) for one in told)


def _card(told: Any) -> dict[str, str]:
    if not isinstance(told, dict) or not all(isinstance(one, str) for one in told.values()):
        raise WireError("the other engine did not say where its memory is")
    return told
