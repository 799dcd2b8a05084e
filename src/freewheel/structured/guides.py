# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the process that follows grammars: ask, and look in later."""

from __future__ import annotations

import importlib.util
import itertools
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from freewheel.errors import StartError
from freewheel.structured.process import WorkerProcess


def can_follow() -> bool:
    """Whether what follows grammars is installed, so that such requests may come."""
    return importlib.util.find_spec("llguidance") is not None


class GuideDesk:
    """Hands out guides over one vocabulary. One thread asks one process for all of them.

    A mask that takes longer than `seconds` ends its own answer: the process is started anew, and
    the other answers are followed from their first token again.
    """

    def __init__(self, vocabulary: Sequence[bytes | None], seconds: float) -> None:
        self._seconds = seconds
        self._process = WorkerProcess("freewheel.structured.guide_worker", vocabulary)
        self._asked: queue.SimpleQueue[HostGuide | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self.changed = threading.Condition()
        """Held where a guide is read or written; told when a mask is there."""

    def guide(self, source: str, stop_ids: Sequence[int]) -> HostGuide:
        """For one answer by the grammar `source`, which ends at one of `stop_ids`."""
        return HostGuide(self, next(self._numbers), source, tuple(stop_ids))

    def ask(self, guide: HostGuide) -> None:
        """Have the guide's next question asked."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="guides", daemon=True)
            self._thread.start()
        self._asked.put(guide)

    def close(self) -> None:
        """Stop the thread and the process. Whoever asks next starts others."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._asked.put(None)
            thread.join()
        self._process.close()

    def _serve(self) -> None:
        while (guide := self._asked.get()) is not None:
            if not self._ask_for(guide, again=True):
                self._ask_for(guide, again=False)

    def _ask_for(self, guide: HostGuide, again: bool) -> bool:
        """False, and the guide hears nothing, if its process died in no time and may be asked
        `again`: somebody killed it, and another one can be told everything."""
        begun = time.monotonic()
        failure: str | None = self._started()
        with self.changed:
            question = guide.question(self._process.starts)
        if question is None:
            return True
        mask, failure = (None, failure) if failure else self._answer(question)
        if again and failure is None and time.monotonic() - begun < self._seconds:
            return False
        with self.changed:
            why = f"no mask was made in {self._seconds:g} s" if failure is None else failure
            guide.receive(question, mask, why)
            self.changed.notify_all()
        return True

    def _started(self) -> str:
        """Why the process does not run; empty where it does."""
        try:
            self._process.start()
        except StartError as error:
            return str(error)
        return ""

    def _answer(self, question: dict[str, Any]) -> tuple[bytes | None, str | None]:
        """(mask, why there is none; None if nothing was said at all)."""
        try:
            found = self._process.ask(question, self._seconds)
        except StartError as error:
            return None, str(error)
        if found is None:
            return None, None
        answer, mask = found
        return (None, str(answer["error"])) if "error" in answer else (mask, "")


class HostGuide:
    """Follows one answer (`host.Guide`). What it knows is the answer, and can be said anew."""

    def __init__(
        self, desk: GuideDesk, number: int, source: str, stop_ids: tuple[int, ...]
    ) -> None:
        self._desk = desk
        self._number = number
        self._source = source
        self._stop_ids = stop_ids
        self._answer: list[int] = []
        self._told = 0  # tokens that the process knows
        self._start = 0  # which process
        self._mask: bytes | None = None
        self._masked = -1  # tokens that the mask stands behind
        self._closed = False
        self.failure: str | None = None

    def follow(self, answer: Sequence[int]) -> None:
        """Ask for the mask behind `answer`."""
        with self._desk.changed:
            if self._masked == len(answer):
                return
            self._answer = list(answer)
        self._desk.ask(self)

    def mask(self) -> bytes | None:
        """The mask asked for last; None: not there yet."""
        with self._desk.changed:
            return self._mask if self._masked == len(self._answer) else None

    def wait(self, seconds: float) -> None:
        """Until the mask is there, or there will be none, or the time is over."""
        with self._desk.changed:
            self._desk.changed.wait_for(
                lambda: self._masked == len(self._answer) or self.failure is not None, seconds
            )

    def close(self) -> None:
        """Nobody asks any more."""
        with self._desk.changed:
            self._closed = True
            opened = self._start > 0
        if opened:
            self._desk.ask(self)

    def question(self, start: int) -> dict[str, Any] | None:
        """What process number `start` must be told; None if nothing. Under `changed`."""
        said: dict[str, Any] = {"id": self._number}
        if self._closed:
            return said | {"closed": True} if start == self._start else None
        if self._masked == len(self._answer) or self.failure is not None:
            return None
        known = self._told if start == self._start else 0
        if start != self._start:
            said |= {"source": self._source, "stop_ids": self._stop_ids}
        return said | {"tokens": self._answer[known:], "turn": len(self._answer), "start": start}

    def receive(self, question: dict[str, Any], mask: bytes | None, failure: str) -> None:
        """The answer to `question`. Under `changed`."""
        if question.get("closed"):
            return
        if mask is None:
            self.failure = failure
            return
        self._start, self._told = question["start"], question["turn"]
        self._mask, self._masked = mask, question["turn"]
