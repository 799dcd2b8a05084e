# SPDX-License-Identifier: Apache-2.0
"""A connection between two engines: messages of JSON, and raw bytes where both expect them."""

from __future__ import annotations

import hmac
import json
import select
import socket
import time
from typing import Any

from freewheel.errors import FreewheelError

MOST_BYTES = 16 << 20
"""Of one message."""

CONNECTING = 5.0
"""Seconds within which another engine takes a connection."""

CODE = 32
"""Bytes of a message's code, where lines are sealed."""

LATE = "no answer within the time that a request waits for its pages"


class WireError(FreewheelError, RuntimeError):
    """Pages did not come: the other engine is gone, too slow, or of another kind."""


class Line:
    """One end. Everything raises WireError once the other end is gone or `until` has passed."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        """`until`: on time.monotonic."""
        self._socket = sock
        self.until = until
        self._said: _Seal | None = None
        self._heard: _Seal | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def seal(self, session: bytes, own: str, other: str) -> None:
        """From here on every message has a code by the key `session`: of what `own` says here, and
        of what `other` says there. One without is no message."""
        self._said, self._heard = _Seal(session, own), _Seal(session, other)

    def say(self, message: dict[str, Any]) -> None:
        raw = json.dumps(message).encode()
        if self._said is not None:
            raw += self._said.code(raw)
        self.send(memoryview(len(raw).to_bytes(4, "big") + raw))

    def hear(self) -> dict[str, Any]:
        """The next message."""
        size = int.from_bytes(self._take(4), "big")
        if size > MOST_BYTES:
            raise WireError(f"a message of {size} bytes; at most {MOST_BYTES} are taken")
        raw = self._take(size)
        if self._heard is not None:
            raw = self._heard.opened(raw)
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise WireError(f"a message that is no JSON: {error}") from error
        if not isinstance(message, dict):
            raise WireError("a message that is no object")
        return message

    def send(self, raw: memoryview) -> None:
        try:
            self._socket.settimeout(self._left())
            self._socket.sendall(raw)
        except TimeoutError as error:
            raise WireError(LATE) from error
        except OSError as error:
            raise WireError(f"the other engine went away: {error}") from error

    def receive_into(self, room: memoryview) -> None:
        """Fill `room`."""
        at = 0
        while at < len(room):
            try:
                self._socket.settimeout(self._left())
                count = self._socket.recv_into(room[at:])
            except TimeoutError as error:
                raise WireError(LATE) from error
            except OSError as error:
                raise WireError(f"the other engine went away: {error}") from error
            if not count:
                raise WireError("the other engine closed the connection")
            at += count

    def gone(self, seconds: float) -> bool:
        """Wait so long at most for the other end to close; whether it has, or has said something
        that was not asked for."""
        poll = select.poll()  # `select` takes no file of a number beyond 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        self._socket.close()

    def _take(self, size: int) -> bytes:
        raw = bytearray(size)
        self.receive_into(memoryview(raw))
        return bytes(raw)

    def _left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise WireError(LATE)
        return left


class _Seal:
    """Codes of what one end says: a message repeated, left out or turned back has another."""

    def __init__(self, session: bytes, who: str) -> None:
        self._session, self._who, self._count = session, who, 0

    def code(self, raw: bytes) -> bytes:
        """Of the next message."""
        self._count += 1
        return hmac.digest(self._session, f"{self._who} {self._count} ".encode() + raw, "sha256")

    def opened(self, raw: bytes) -> bytes:
        """The next message without its code. Raises WireError if it is not that message's."""
        message, code = raw[:-CODE], raw[-CODE:]
        if not hmac.compare_digest(code, self.code(message)):
            raise WireError("a message of somebody who does not have the key")
        return message


def connect(host: str, port: int, until: float) -> Line:
    """A line to the engine that listens there. Raises WireError."""
    left = min(CONNECTING, until - time.monotonic())
    if left <= 0:
        raise WireError("too many prompts are fetched to begin with this one in time")
    try:
        sock = socket.create_connection((host, port), timeout=left)
    except (OSError, ValueError) as error:  # a ValueError: no name that a host could have
        raise WireError(f"no engine at {host}:{port}: {error}") from error
    return Line(sock, until)
