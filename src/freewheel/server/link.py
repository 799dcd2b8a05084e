# SPDX-License-Identifier: Apache-2.0
"""The HTTP process's end of the line: starts the engine, watches it, replaces it when it fails."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from freewheel.config import EngineConfig
from freewheel.engine import Load, RoundTimes
from freewheel.errors import ConfigError, FreewheelError
from freewheel.server import wire as m
from freewheel.server.failures import ApiError, engine_lost, not_ready
from freewheel.server.journal import Journal, write_dump
from freewheel.server.settings import TENANT, ServerSettings
from freewheel.server.tickets import Events, Ledger, Ticket
from freewheel.spec import FinishReason, Handoff, SamplingParams

log = logging.getLogger("freewheel.server")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
TICK = 1.0
"""How often is looked whether the engine still says something."""
STARTING_SECONDS, STARTING_SHARE = 600.0, 10
"""How long an engine may start without a word: so long, or so many times as long as later."""
LAST_WORDS = 10.0
"""How long an engine that said why it cannot start may be away before that is here."""
ENDING_SECONDS = 10.0
"""How long an engine may take to end by itself: it ends its ranks, and clears away."""
RESTART_SECONDS = 2.0
"""The same where it is restarted: nobody waits for it to clear away."""
ADDRESS_BYTES = 100
"""A Unix socket's path has 107 bytes at most."""


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


class EngineState(StrEnum):
    """Whether there is an engine to ask."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    UNFIT = "unfit"


class Link:
    """The engine process and the requests that it works on."""

    def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        self.config, self.settings = config, settings
        self.state = EngineState.STARTING
        self.ready: m.Ready | None = None
        self.load: Load | None = None
        self.loading: m.Loading | None = None
        self.restarts = 0
        self.unfit = ""
        """Why the engine could not start, if it said so."""
        self._misled = self._planned = False
        self.ledger = Ledger(settings.queue_tokens, settings.max_requests)
        self.on_round: Callable[[RoundTimes], None] = lambda _: None
        self.on_step: Callable[[Ticket, m.Step, float], None] = lambda *_: None
        self.on_end: Callable[[Ticket, FinishReason], None] = lambda *_: None
        self.heard = time.monotonic()
        self._ids = itertools.count()
        self._journal: Journal | None = None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._folder: Path | None = None
        self._runner: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start an engine, and another whenever one ends. Raises ConfigError."""
        if len(tempfile.gettempdir()) > ADDRESS_BYTES - len("/freewheel-00000000/engine"):
            raise ConfigError(f"TMPDIR: {tempfile.gettempdir()} is too long for a socket's path")
        self._runner = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the engine and everything that waits for it."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        await self._end_process()
        self._lose_all()
        self._context.destroy(linger=0)
        self.clear_away()

    def clear_away(self) -> None:
        """Leave no file behind."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def check_ready(self) -> None:
        """Raise ApiError 503 unless requests can be taken."""
        if self.state is not EngineState.READY:
            raise not_ready(f"the engine is {self.state}")

    def open(
        self,
        prompt: list[int],
        params: SamplingParams,
        events: Events,
        cache_salt: str = "",
        priority: int = 0,
        shows: bool = False,
        handoff: Handoff | None = None,
    ) -> Ticket:
        """Send a request to the engine, in the caller's name. Raises ApiError if there is none."""
        self.check_ready()
        ticket = Ticket(f"{next(self._ids)}", prompt, params, events)
        self.ledger.live[ticket.id] = ticket
        # The seed is drawn here, so that whoever replays the order draws the same tokens.
        seed = secrets.randbits(63) if params.seed is None else params.seed
        given = (replace(params, seed=seed), cache_salt, priority, TENANT.get(), shows, handoff)
        order = m.Submit(ticket.id, prompt, *given)
        if self._journal is not None:
            self._journal.submitted(order)
        self._send(order)
        return ticket

    def close(self, tickets: list[Ticket], reason: FinishReason = FinishReason.ABORT) -> None:
        """Nobody waits for more of these: what has not ended at the engine is aborted there."""
        open_tickets = [one for one in tickets if self.ledger.live.pop(one.id, None) is not None]
        for ticket in open_tickets:
            ticket.ended = True
            self.on_end(ticket, reason)
        if open_tickets and self.state is EngineState.READY:
            self._send(m.Abort([ticket.id for ticket in open_tickets]))

    def give_up(self, tickets: list[Ticket], error: ApiError) -> None:
        """End these, and tell those who wait for them why."""
        self.close(tickets)
        for ticket in tickets:
            ticket.fail(error)

    def flush(self) -> None:
        """Let the engine forget the prompts that it keeps."""
        self.check_ready()
        self._send(m.Flush())

    def kill(self) -> None:
        """End the engine process as the operator asks; another one follows, as after any end.

        As if this process were gone: it then ends its ranks too, which would take any other end of
        it for the loss of a rank. One that cannot is killed.
        """
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._planned = True
        assert process.stdin is not None
        process.stdin.close()
        asyncio.get_running_loop().call_later(RESTART_SECONDS, _kill, process)

    def _send(self, order: m.Order) -> None:
        """In order, and at once as far as the socket can tell: its queue is unbounded."""
        assert self._socket is not None
        self._socket.send(m.encode(order))

    async def _keep_running(self) -> None:
        pause = SHORTEST_PAUSE
        for generation in itertools.count():
            begun = time.monotonic()
            self.state, self.ready, self.loading, self.unfit = EngineState.STARTING, None, None, ""
            try:
                await self._live_once()
            except (OSError, zmq.ZMQError) as error:
                log.error("the engine process could not be started: %s", error)
            if self.unfit and generation == 0:
                self.state = EngineState.UNFIT  # `raise_if_unfit` says why
                return
            if self.unfit:
                log.error("the engine cannot start: %s", self.unfit)
            self.state = EngineState.DOWN
            self.restarts += 1
            if time.monotonic() - begun > 2 * LONGEST_PAUSE:
                pause = SHORTEST_PAUSE
            if self._planned:
                pause, self._planned = SHORTEST_PAUSE, False
            else:
                log.error("the engine process ended; the next one starts in %.1f s", pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _live_once(self) -> None:
        """One engine, from its start to its end. Raises OSError or ZMQError if there is none."""
        # Its own folder, of mode 0700: something may have cleared temporary files away meanwhile.
        self._folder = Path(tempfile.mkdtemp(prefix="freewheel-"))
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self.heard = time.monotonic()
        # What nobody will read is not kept: it would hold every token of a busy day.
        self._journal = None if self.settings.dump_dir is None else Journal()
        try:
            address = f"ipc://{self._folder}/engine"
            self._socket.bind(address)
            self._process = await self._started(address)
            code = await self._until_over(self._socket, self._process)
            self._keep_for_replay(f"the engine process ended with code {code}")
        finally:
            self._socket.close(linger=0)
            self._lose_all()
            self.clear_away()

    def raise_if_unfit(self) -> None:
        """Raise ConfigError or FreewheelError if the engine could not start at all: the former if
        an option or the model's folder is to blame."""
        if self.state is EngineState.UNFIT:
            raise ConfigError(self.unfit) if self._misled else FreewheelError(self.unfit)

    async def _started(self, address: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command(address),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal is the HTTP process's business
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self.config) + b"\n")
        return process

    def _command(self, address: str) -> tuple[str, ...]:
        logs = ("--json-logs",) if self.settings.json_logs else ()
        return sys.executable, "-m", "freewheel.server.worker", address, *logs

    async def _until_over(
        self, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process
    ) -> int:
        """Listen until the process ends, and see to it that it does. Returns its exit code."""
        over = asyncio.create_task(process.wait())
        listener = asyncio.create_task(self._listen(socket))
        watchdog = asyncio.create_task(self._watch(process))
        try:
            await asyncio.wait({over, listener}, return_when=asyncio.FIRST_COMPLETED)
            if listener.done():
                fault = listener.exception()
                log.error("what the engine says cannot be read; it is killed", exc_info=fault)
                process.kill()
            code = await over
            self.state = EngineState.DOWN
            await self._hear_out(code)
            return code
        finally:
            for task in (over, listener, watchdog):
                task.cancel()
            await asyncio.gather(over, listener, watchdog, return_exceptions=True)

    async def _hear_out(self, code: int) -> None:
        """What the engine said last may still be on its way."""
        await asyncio.sleep(0.05)
        late = time.monotonic() + LAST_WORDS
        while code == m.UNFIT and not self.unfit and time.monotonic() < late:
            await asyncio.sleep(0.05)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            report = m.decode_report(await socket.recv())
            self.heard = time.monotonic()
            self._hear(report)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """An engine that has nothing to say is dead, even if its process is not.

        Time in which this process stood still does not count: it would not have heard anything.
        """
        limit = self.settings.stall_seconds
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK)
            now = time.monotonic()
            self.heard = min(now, self.heard + max(0.0, now - before - TICK))
            silent = now - self.heard
            ready = self.state is EngineState.READY
            if silent > (limit if ready else max(STARTING_SECONDS, STARTING_SHARE * limit)):
                log.error("the engine has been silent for %.0f s and is killed", silent)
                process.kill()
                return

    def _hear(self, report: m.Report) -> None:
        if isinstance(report, m.Progress):
            self.load = report.load
            if self._journal is not None:
                self._journal.heard(report)
            for times in report.rounds:
                self.on_round(times)
            now = time.perf_counter()
            for step in report.steps:
                self._deliver(step, now)
        elif isinstance(report, m.Refused):
            self._refuse(report)
        elif isinstance(report, m.Ready):
            self.state, self.ready, self.load = EngineState.READY, report, report.load
        elif isinstance(report, m.Loading):
            self.loading = report
        else:
            self.unfit, self._misled = report.message, report.misled

    def _deliver(self, step: m.Step, now: float) -> None:
        ticket = self.ledger.live.get(step.id)
        if ticket is None:
            return  # closed while this was on its way
        before = ticket.latest
        ticket.note(step, now)
        self.on_step(ticket, step, now if before is None else before)
        ticket.events.put_nowait((ticket, step))
        if step.finish is not None:
            del self.ledger.live[step.id]
            self.on_end(ticket, FinishReason(step.finish))

    def _refuse(self, report: m.Refused) -> None:
        if self._journal is not None:
            self._journal.refused(report.id)
        ticket = self.ledger.live.pop(report.id, None)
        if ticket is not None:
            ticket.fail(ApiError(400, report.message, param=report.field))

    def _keep_for_replay(self, why: str) -> None:
        """Write down what the engine was doing, if it was and if there is a folder for it."""
        folder, journal = self.settings.dump_dir, self._journal
        if folder is None or journal is None or not journal.live:
            return
        device = "" if self.ready is None else self.ready.device
        dump = journal.dump(self.config, device, why)
        try:
            path = write_dump(dump, folder)
        except OSError as error:
            log.error("the dump could not be written: %s", error)
        else:
            log.error("freewheel replay %s shows what the engine was doing", path)

    def _lose_all(self) -> None:
        for ticket in self.ledger.live.values():
            ticket.fail(engine_lost())
            self.on_end(ticket, FinishReason.ERROR)
        self.ledger.live.clear()

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), ENDING_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
