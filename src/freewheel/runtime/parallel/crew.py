# SPDX-License-Identifier: Apache-2.0
"""The processes of a mesh: rank 0 starts the others of its machine, watches them, and ends them.

On one machine ranks find each other through a file in a private folder and talk over the loopback
interface: nothing listens to the outside. Over several machines a launcher (torchrun) starts all
ranks and says in the environment where they meet.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from freewheel.config import Launched, keep_to_loopback, rank_environment
from freewheel.errors import ConfigError, RankError
from freewheel.runtime.parallel.channel import Channel, Order, Task, bytes_of
from freewheel.runtime.parallel.group import Groups, close_groups, meeting_place, open_groups
from freewheel.runtime.parallel.peers import Leader

_dist = cast(Any, dist)  # half of its members lack types

STARTING = 300.0
"""Seconds that a rank has to start and to say so."""

ENDING = 10.0
"""Seconds that ranks have to end by themselves."""

NOTICING = 10.0
"""Seconds in which the watcher sees the end of a rank whose connections have closed."""

PARTING = 2.0
"""Seconds to tell them. They hear nothing while they wait in a round that this process left."""

_logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")

_CREWS: list[Crew] = []
"""The one that this process leads, if any."""

_STARTED: list[LocalCrew] = []
"""Those whose ranks may run, from before they meet to their end."""


class Crew:
    """Rank 0's hold on the others. Engines that share a mesh share the crew."""

    def __init__(self, device: str, ranks: int) -> None:
        self.device, self.ranks = device, ranks
        self.shape: tuple[int, int] | None = None
        self._engines = 0
        self._open: set[int] = set()
        self._lost = ""
        self._channel: Channel | None = None
        self._groups: Groups | None = None

    @property
    def channel(self) -> Channel:
        assert self._channel is not None, "the ranks have met"
        return self._channel

    def lead(self, description: str) -> Leader:
        """Have every rank open an engine as `description` says, and lead it.

        The description says which mesh: the others form it when they read that.
        """
        assert self.shape is not None, "the crew was assembled"
        raw = bytes_of(description)
        engine, self._engines = self._engines, self._engines + 1
        self._open.add(engine)
        self.channel.tell(Order(Task.OPEN, engine, raw.numel()), raw)
        self.channel.form(*self.shape)
        return Leader(self.channel, engine, self.check, self.leave)

    def check(self) -> None:
        """Raise RankError if a rank is known to be gone."""
        if self._lost:
            raise RankError(f"tp: {self._lost}; what was under way is lost; start the engine anew")

    def leave(self, engine: int) -> None:
        """An engine was closed here: the others close it, for ranks wait for further engines."""
        if engine in self._open and not self._lost:
            self._open.discard(engine)
            with suppress(RankError):  # a rank is gone, and its share with it
                self.channel.tell(Order(Task.CLOSE, engine))

    def why_now(self) -> str:
        """What is known at once of a rank that is gone."""
        return self._lost

    def why(self) -> str:
        """What is known of a rank that is gone: asked when ranks fail to meet."""
        return self._lost

    def meet(self, store: Any, local: int = 0) -> None:
        """Wait for the other ranks, and open the groups."""
        if dist.is_initialized():
            raise ConfigError(
                "tp: this process is in a group of torch.distributed already, which an engine "
                "with several ranks makes for itself"
            )
        self._groups = open_groups(self.device, 0, self.ranks, store, local)
        self._channel = Channel(self._groups, self.why)

    def close(self) -> None:
        """Let all ranks end."""
        if self._channel is None or self._lost or self._part(self._channel):
            if self._channel is not None:
                self._channel.release(waits=not self._lost)
            close_groups()

    def _part(self, channel: Channel) -> bool:
        """Tell the others to end, or end them; whether this process still waits for none."""

        def tell() -> None:
            with suppress(RankError):  # it has ended already
                channel.tell(Order(Task.END))

        teller = threading.Thread(target=tell, name="parting", daemon=True)
        teller.start()
        teller.join(PARTING)
        if teller.is_alive():
            self._end_others()
            teller.join(PARTING)
        return not teller.is_alive()

    def _end_others(self) -> None:
        """At once, where this process started them; a launcher ends its own."""


class LocalCrew(Crew):
    """The other ranks are processes that this one starts."""

    def __init__(self, device: str, ranks: int) -> None:
        super().__init__(device, ranks)
        self._folder = Path(tempfile.mkdtemp(prefix="freewheel-ranks-"))
        self._closing = threading.Event()
        self._patience = ENDING
        self._pids: dict[int, int] = {}
        self._begun = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        keep_to_loopback()
        _STARTED.append(self)
        self._watcher.start()
        store = meeting_place(str(self._folder / "store"), ranks)
        try:
            self._await(store)
            self.meet(store)
        finally:
            if self._channel is None:  # a rank did not come, or the user went
                self._end_others()
                self.close()

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id, of the other ranks."""
        return self._pids

    def leave(self, engine: int) -> None:
        """They were started for engines, and end with the last: another one gets new ranks."""
        if self._open - {engine}:
            super().leave(engine)
        elif self in _CREWS:
            _CREWS.remove(self)
            self.close()

    def why(self) -> str:
        """The watcher sees a process end a moment after its connections close."""
        until = time.monotonic() + NOTICING
        while not self._lost and time.monotonic() < until:
            time.sleep(0.05)
        return self._lost

    def close(self) -> None:
        super().close()
        self._closing.set()
        self._watcher.join(2 * ENDING)
        if self in _STARTED:
            _STARTED.remove(self)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the others there and then, once it is known which processes they are."""
        self._begun.wait(PARTING)
        for pid in () if self._lost else tuple(self._pids.values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_others(self) -> None:
        self._patience = 0.0
        self._closing.set()

    def _await(self, store: Any) -> None:
        """Until every rank has said that it runs. Raises RankError if one ends instead."""
        names = [f"running.{rank}" for rank in range(1, self.ranks)]
        until = time.monotonic() + STARTING
        while not store.check(names):
            self.check()
            if time.monotonic() > until:
                raise RankError(f"tp: a rank did not start within {STARTING:.0f} seconds")
            time.sleep(0.02)

    def _watch(self) -> None:
        """In a thread of its own: there the launcher leaves this process's signals alone."""
        _logger.setLevel(logging.CRITICAL)  # what it has to say, `_lost` says
        others = range(self.ranks - 1)
        own = (str(self._folder / "store"), str(self.ranks), self.device, str(os.getpid()))
        context = start_processes(
            "freewheel",
            sys.executable,
            {n: ("-m", "freewheel.worker", "--follow", *own, str(n + 1)) for n in others},
            {n: rank_environment() for n in others},
            DefaultLogsSpecs(str(self._folder / "logs")),  # as it has one, in any case
        )
        self._pids = {n + 1: pid for n, pid in context.pids().items()}
        self._begun.set()
        while not self._closing.wait(0.1):
            ended = context.wait(0)
            if ended is not None:
                self._lose(ended)
                return
        if self._patience:
            context.wait(self._patience, 0.05)
        context.close(signal.SIGTERM, timeout=int(ENDING))

    def _lose(self, ended: Any) -> None:
        """A rank has ended; the launcher has ended the others. Those on a GPU wait no longer."""
        first = min(ended.failures.values(), key=lambda f: f.timestamp, default=None)
        if first is None:
            self._lost = "the other ranks ended"
        else:
            self._lost = f"rank {first.local_rank + 1} ended with exit code {first.exitcode}"
        if self.device == "cuda" and self._groups is not None:
            self._groups.abort()


def assemble(device: str, tp: int, dp: int = 1) -> Crew:
    """The crew that this process leads, of `dp` copies that `tp` ranks share each; started if there
    is none yet.

    Raises ConfigError if it leads another mesh, RankError if a rank does not start.
    """
    ranks = tp * dp
    if any(crew.why_now() for crew in _CREWS):
        dismiss()  # an engine made anew gets new ranks
    for crew in _CREWS:
        if (crew.device, crew.ranks) != (device, ranks):
            raise ConfigError(
                f"tp: this process leads {crew.ranks} ranks on {crew.device} already, and cannot "
                f"lead {ranks} on {device} as well"
            )
        if crew.shape not in (None, (tp, dp)):
            raise ConfigError(f"dp: this process leads ranks of tp, dp = {crew.shape} already")
        crew.shape = (tp, dp)
        return crew
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"tp: {ranks} ranks need as many CUDA devices, and there are "
            f"{torch.cuda.device_count()}"
        )
    crew = _enlist(LocalCrew(device, ranks))
    crew.shape = (tp, dp)
    return crew


def join_launched(launched: Launched, device: str) -> Channel:
    """Meet ranks that a launcher started: rank 0 gets a crew to lead, the others their channel."""
    if launched.rank:
        groups = open_groups(device, launched.rank, launched.ranks, None, launched.local)
        return Channel(groups, lambda: "")
    crew = _enlist(Crew(device, launched.ranks))
    crew.meet(None, launched.local)
    return crew.channel


def dismiss() -> None:
    """End the crew that this process leads; also when the process ends."""
    while _CREWS:
        _CREWS.pop().close()


def kill_ranks() -> None:
    """End the other ranks that this process started, for one that itself ends there and then.

    They would take the end of rank 0, which nobody told them of, for the loss of it, and say so.
    """
    for crew in tuple(_STARTED):
        crew.kill()


def _enlist(crew: Crew) -> Crew:
    if not _CREWS:
        atexit.register(dismiss)
    _CREWS.append(crew)
    return crew
