# SPDX-License-Identifier: Apache-2.0
"""Where other engines fetch the prompts that this one has computed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from freewheel.errors import ConfigError
from freewheel.spec.handoff import Piece, WireSettings
from freewheel.transfer.keys import UNASKED, Key
from freewheel.transfer.line import Line, WireError
from freewheel.transfer.wire import Wire

LINGER = 1.0
"""Seconds for the reader to close the connection itself, once it has what it wanted."""

TELLING = 1.0
"""Seconds beyond a reader's time in which it can still be told that its prompt did not come."""

MOST_READERS = 256
"""Connections at one time; who comes on top is turned away, and computes."""

HERE = 0
"""Of the ranks that have a parcel: the one whose port this is."""

REST = 0.05
"""Seconds to the next try where no connection could be taken."""


@dataclass(eq=False)
class _Parcel:
    """What is in a room. `ranks`: which ranks have it, as steps from this port to theirs.
    `readers`: lines over which it is being read."""

    pieces: tuple[Piece, ...]
    until: float
    ranks: tuple[int, ...]
    readers: int = 0
    read: bool = False


class Post:
    """Listens from the start; each line has a thread. The engine's thread calls the rest.

    A parcel is held until it was read, or nobody has come for it in time. Where an engine has
    several ranks, each has a post. A reader asks that of rank 0, whose line holds the parcel on all
    ranks that have it until it says that it was read; its bytes go over lines to these.

    Raises ConfigError if nobody can listen there.
    """

    def __init__(
        self,
        wire: Wire,
        layout: str,
        settings: WireSettings,
        awake: Callable[[], None],
        key: Key | None = None,
    ) -> None:
        """`layout`: of what the slots hold; readers of another are refused. `awake` is called when
        there may be something to let go of. `key`: what readers must have."""
        self._key = key
        self._wire, self._layout, self._seconds = wire, layout, settings.seconds
        self._awake = awake
        self._changed = threading.Condition()
        self._parcels: dict[str, _Parcel] = {}
        self._refused: dict[str, tuple[str, float]] = {}
        self._closed = False
        self._places = threading.BoundedSemaphore(MOST_READERS)
        try:
            self._listener = socket.create_server(
                (settings.host, settings.port),
                family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
            )
        except OSError as error:
            raise ConfigError(
                f"kv_port: cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
                "give another with --kv-port"
            ) from error
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._listen, name="post", daemon=True).start()

    def offer(self, room: str, pieces: Sequence[Piece], ranks: Sequence[int] = (0,)) -> None:
        """The prompt of `room` is in these slots, which stay as they are until `taken` says so.

        `ranks`: which ranks have it, as steps from this post's port to theirs; 0 is this one.
        """
        until = time.monotonic() + self._seconds
        with self._changed:
            self._parcels[room] = _Parcel(tuple(pieces), until, tuple(ranks))
            self._changed.notify_all()

    def withdraw(self, room: str) -> None:
        """Nobody may have it any more."""
        with self._changed:
            self._parcels.pop(room, None)

    def refuse(self, room: str, why: str) -> None:
        """There will be no such prompt."""
        with self._changed:
            self._refused[room] = why, time.monotonic() + self._seconds
            self._changed.notify_all()

    def taken(self) -> list[tuple[str, bool]]:
        """(room, was read) of parcels that need not be held any longer."""
        now = time.monotonic()
        with self._changed:
            over = [
                (room, one.read)
                for room, one in self._parcels.items()
                if one.read or (not one.readers and now > one.until)
            ]
            for room, _ in over:
                del self._parcels[room]
            self._refused = {r: one for r, one in self._refused.items() if now < one[1]}
        return over

    def close(self) -> None:
        """Others may listen there."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # its thread waits there, and holds the port
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # whoever knocked is gone, or files are used up for a while
                time.sleep(REST)
                continue
            if not self._places.acquire(blocking=False):
                sock.close()
                continue
            until = time.monotonic() + self._seconds + TELLING
            attend = threading.Thread(target=self._attend, args=(sock, until), daemon=True)
            attend.start()

    def _attend(self, sock: socket.socket, until: float) -> None:
        try:
            with sock:
                self._hand_over(Line(sock, until))
        except (WireError, OSError):
            pass  # the reader knows better, or nobody is there to be told
        finally:
            self._places.release()
            self._awake()

    def _hand_over(self, line: Line) -> None:
        asked = line.hear()
        if self._key is not None:
            asked = self._key.admit(line, asked)
        elif "hello" in asked:
            line.say({"refused": UNASKED})
            return
        room, first, mine = asked.get("room"), asked.get("first"), asked.get("layout")
        part = asked.get("part")
        if not isinstance(room, str) or not isinstance(first, int) or first < 0:
            raise WireError("a reader that asks for no room")
        if not isinstance(part, str | None):
            raise WireError("a reader that asks for no part of a room")
        if mine != self._layout or asked.get("wire") != self._wire.name:
            kind = "wire" if mine == self._layout else "layout"
            line.say({"refused": f"the engines differ in {kind}"})
            return
        found = self._await(line, room)
        if isinstance(found, str):
            line.say({"refused": found})
            return
        try:
            self._serve(line, found, room, first, part)
        finally:
            with self._changed:
                found.readers -= 1

    def _serve(self, line: Line, found: _Parcel, room: str, first: int, part: str | None) -> None:
        """`part`: the note of a reader whose other line, to rank 0, says when all is read."""
        if part is not None and HERE not in found.ranks:
            line.say({"refused": "another of its ranks has the prompt"})
            return
        pieces = found.pieces[first:]
        told = {"pieces": [asdict(one) for one in pieces], "card": self._wire.card()}
        line.say(told | {"ranks": list(found.ranks)})
        slots = [one.slot for one in pieces] if HERE in found.ranks else []
        self._wire.serve(line, slots, room if part is None else part)
        found.read |= part is None
        line.gone(LINGER)

    def _await(self, line: Line, room: str) -> _Parcel | str:
        """What is in the room, once something is; or why there will be nothing."""
        with self._changed:
            while True:
                if room in self._parcels:
                    self._parcels[room].readers += 1
                    return self._parcels[room]
                if room in self._refused:
                    return self._refused[room][0]
                left = line.until - TELLING - time.monotonic()
                if left <= 0:
                    return "no such prompt was computed in time"
                self._changed.wait(left)
