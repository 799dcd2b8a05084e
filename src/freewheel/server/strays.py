# SPDX-License-Identifier: Apache-2.0
"""Lines that reach standard error by no logger, made objects: those of libraries in C++, of
processes that this one starts, and of the command line's own errors."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from typing import TextIO

from freewheel.server.logs import JsonLines

STANDARD_ERROR = 2
LINE_BYTES = 1 << 16
"""A longer one is told in parts."""
LAST_WORDS = 2.0
"""Seconds, at the end, for what is on its way."""


def gather_strays() -> TextIO:
    """Make every line on this process's standard error one JSON object, to its end.

    Processes that it starts inherit that; lines of theirs that are objects pass as they are.
    Returns the stream for lines that are objects already: they go the short way, so that a process
    that dies suddenly loses none.
    """
    straight = os.dup(STANDARD_ERROR)
    outlet, inlet = os.pipe()
    os.dup2(inlet, STANDARD_ERROR)  # which processes that are started inherit
    os.close(inlet)
    stream = os.fdopen(straight, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    teller = threading.Thread(target=_tell, args=(outlet, stream), name="strays", daemon=True)
    teller.start()

    def end() -> None:
        os.dup2(straight, STANDARD_ERROR)
        teller.join(LAST_WORDS)

    atexit.register(end)
    return stream


def _tell(outlet: int, stream: TextIO) -> None:
    """Until nobody holds the other end."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    rest = b""
    while chunk := os.read(outlet, LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            _tell_line(line.decode("utf-8", "backslashreplace").rstrip(), handler)
    _tell_line(rest.decode("utf-8", "backslashreplace").rstrip(), handler)


def _tell_line(line: str, handler: logging.StreamHandler[TextIO]) -> None:
    if not line:
        return
    if _is_object(line):
        handler.stream.write(line + "\n")
        handler.flush()
        return
    level = logging.ERROR if line.lower().startswith("error") else logging.WARNING
    handler.handle(logging.LogRecord("stderr", level, "", 0, "%s", (line,), None))


def _is_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
