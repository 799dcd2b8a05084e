# SPDX-License-Identifier: Apache-2.0
"""A few threads for work that waits for others, and that no process waits for when it ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Threads:
    """At most `most` at one time, each started when it is first needed."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._count = self._idle = 0
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Do it once a thread has time for it; never, once this is closed.

        An error that it raises is told as that of any thread, and ends its thread alone.
        """
        with self._changed:
            self._work.append(work)
            self._changed.notify()
            if self._idle >= len(self._work) or self._count == self._most:
                return
            self._count += 1
        self._start()

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start(self) -> None:
        # Those of the standard library's pools are joined when the process ends.
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        ended = False
        try:
            while (work := self._next()) is not None:
                work()
            ended = True
        finally:
            if not ended:
                self._start()  # in its place

    def _next(self) -> Callable[[], None] | None:
        """What is to be done next; None if nothing ever is."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._work or self._closed)
            self._idle -= 1
            return None if self._closed else self._work.popleft()
