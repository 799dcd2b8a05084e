# SPDX-License-Identifier: Apache-2.0
"""What the engine was told and what it said since it last had nothing to do.

The HTTP process keeps it, so it outlives the engine however that ends. Written to a file when an
engine fails, it can be replayed elsewhere: the scheduler's choices follow from the orders and from
the turn at which each was obeyed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import freewheel
from freewheel.config import EngineConfig
from freewheel.engine import RoundTimes
from freewheel.errors import ConfigError
from freewheel.server import wire as m

FORMAT = 1
MOST_TOKENS = 1 << 22
"""Tokens of prompts and answers that are kept; of more, ended requests go first."""
MOST_ROUNDS = 1 << 16
"""Rounds that are kept, the first ones: as many as can be compared."""


Shape = tuple[int, int, int, int]


class Entry(Struct):
    """A request. `begun` and `aborted`: the engine's turn at which it heard of it; None if it may
    not have. `tokens`: what it is known to have answered.
    """

    order: m.Submit
    begun: int | None = None
    aborted: int | None = None
    tokens: list[int] = msgspec.field(default_factory=list[int])
    finish: str | None = None

    @property
    def live(self) -> bool:
        return self.finish is None and self.aborted is None

    @property
    def size(self) -> int:
        return len(self.order.prompt) + len(self.tokens)


class Dump(Struct):
    """A journal as a file. `turns`: the engine's last known; `whole`: nothing had to be left out.
    `rounds`: batch, width, depth and rows in use of each that was read, in order.

    Turns are counted from when the engine last had nothing to do. The prefix cache may have held
    prompts from before: a replay computes them anew.
    """

    format: int
    freewheel: str
    written: float
    why: str
    config: EngineConfig
    device: str
    turns: int
    whole: bool
    entries: list[Entry]
    rounds: list[Shape] = msgspec.field(default_factory=list[Shape])


def shape_of(times: RoundTimes) -> Shape:
    """What a dump says of a round."""
    return times.batch, times.width, times.depth, times.rows


class Journal:
    """Of one engine process."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.whole = True
        self._base = self._turn = self._tokens = 0
        self._rounds: list[Shape] = []

    @property
    def live(self) -> bool:
        """A request is under way."""
        return any(entry.live for entry in reversed(self.entries.values()))  # late ones mostly are

    def submitted(self, order: m.Submit) -> None:
        """An order was sent."""
        if not self.live:
            self._begin_anew()
        self.entries[order.id] = Entry(order)
        self._tokens += len(order.prompt)
        if self._tokens > MOST_TOKENS:
            self._shed()

    def refused(self, request_id: str) -> None:
        """It changed nothing in the engine."""
        entry = self.entries.pop(request_id, None)
        self._tokens -= 0 if entry is None else entry.size

    def heard(self, report: m.Progress) -> None:
        """The engine's latest report."""
        for request_id, turn in report.begun.items():
            if request_id in self.entries:
                self.entries[request_id].begun = turn - self._base
        for request_id, turn in report.aborted.items():
            if request_id in self.entries:
                self.entries[request_id].aborted = turn - self._base
        for step in report.steps:
            if step.id in self.entries:
                entry = self.entries[step.id]
                entry.tokens += step.tokens
                entry.finish = step.finish or entry.finish
                self._tokens += len(step.tokens)
        self._rounds += map(shape_of, report.rounds[: MOST_ROUNDS - len(self._rounds)])
        self._turn = report.turn

    def dump(self, config: EngineConfig, device: str, why: str) -> Dump:
        """Everything that is kept."""
        return Dump(
            format=FORMAT,
            freewheel=freewheel.__version__,
            written=time.time(),
            why=why,
            config=config,
            device=device,
            turns=self._turn - self._base,
            whole=self.whole,
            entries=list(self.entries.values()),
            rounds=list(self._rounds),
        )

    def _begin_anew(self) -> None:
        self.entries.clear()
        self._rounds.clear()
        self.whole = True
        self._base, self._tokens = self._turn, 0

    def _shed(self) -> None:
        """Leave out ended requests, the earliest first, until half of the room is free."""
        for request_id, entry in list(self.entries.items()):
            if self._tokens <= MOST_TOKENS // 2:
                return
            if not entry.live:
                del self.entries[request_id]
                self._tokens -= entry.size
                self.whole = False


def write_dump(dump: Dump, folder: Path) -> Path:
    """A new file that its owner alone reads: it holds what clients said.

    Raises OSError, and leaves no half of it, if it cannot be written.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(dump.written))
    path = folder / f"freewheel-{stamp}-{os.getpid()}-{time.monotonic_ns()}.json"
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(msgspec.json.encode(dump))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def read_dump(path: Path) -> Dump:
    """Raises ConfigError for a file that is no dump of this version."""
    try:
        data: Any = path.read_bytes()
        dump = msgspec.json.decode(data, type=Dump)
    except OSError as error:
        raise ConfigError(f"dump: {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"dump: {path} is no dump: {error}") from error
    if dump.format != FORMAT:
        raise ConfigError(f"dump: {path} has format {dump.format}; this version reads {FORMAT}")
    return dump
