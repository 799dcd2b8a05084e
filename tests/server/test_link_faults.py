# SPDX-License-Identifier: Apache-2.0
"""Faults of the line between the two processes, with engines that only pretend to be ones."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from freewheel.config import EngineConfig
from freewheel.engine import Load, PoolLoad
from freewheel.errors import ConfigError, FreewheelError
from freewheel.server import link as link_module
from freewheel.server import wire as m
from freewheel.server.failures import ApiError
from freewheel.server.journal import read_dump
from freewheel.server.link import EngineState, Link
from freewheel.server.settings import ServerSettings
from freewheel.server.tickets import Ticket
from freewheel.spec import SamplingParams
from tests.waiting import PATIENCE

LOAD = Load(0, 0, 0, PoolLoad("rows", 1, 1, 0, 0, 0), (), 0, 0, 0, None, 0)
READY = m.encode(m.Ready(100, 0, "cpu", "tape", "float32", "none", 0.0, LOAD))
IDLE = m.encode(m.Progress([], [], LOAD))

ENGINE = f"""
import os, sys, threading, time, zmq
def parent():
    while sys.stdin.buffer.read(4096): pass
    os._exit(0)
sys.stdin.buffer.readline()
threading.Thread(target=parent, daemon=True).start()
socket = zmq.Context().socket(zmq.PAIR)
socket.connect(sys.argv[1])
def asked():
    while not socket.poll(100):
        socket.send({IDLE!r})
def idle(pause=0.1):
    while True:
        time.sleep(pause)
        socket.send({IDLE!r})
"""
WHOLE = ENGINE + f"socket.send({READY!r})\nidle()"


def unfit(message: str, misled: bool = False) -> str:
    said = m.encode(m.Unfit(message, misled))
    return ENGINE + f"socket.send({said!r})\ntime.sleep(0.2)\nsys.exit(3)"


BROKEN = {
    "bad frame on the link": WHOLE.replace("idle()", r"asked(); socket.send(b'\xc1'); idle()"),
    "frame of an unknown kind": WHOLE.replace(
        "idle()", f"asked(); socket.send({msgspec.msgpack.encode({'type': 'Hello'})!r}); idle()"
    ),
    "report of a wrong shape": WHOLE.replace(
        "idle()",
        f"asked(); socket.send({msgspec.msgpack.encode({'type': 'Progress', 'steps': 3})!r});"
        " idle()",
    ),
    "engine ends by itself": WHOLE.replace("idle()", "asked(); sys.exit(0)"),
    "engine aborts": WHOLE.replace("idle()", "asked(); os.abort()"),
    "engine hangs": WHOLE.replace("idle()", "asked(); time.sleep(1e9)"),
}
"""What an engine does once it is asked for something; the next one is whole."""

SLOW_START = {
    "engine ends at its start": "raise SystemExit",
    "engine has no memory at its start": "raise MemoryError",
    "engine hangs at its start": ENGINE + "time.sleep(1e9)",
}


class Engines:
    """A link whose engines are these scripts, one after the other; the last one again and again."""

    def __init__(self, patch: pytest.MonkeyPatch, *scripts: str, **settings: Any) -> None:
        self._scripts = list(scripts)
        options: dict[str, Any] = {"stall_seconds": PATIENCE} | settings
        self.link = Link(EngineConfig(model="demo"), ServerSettings(model_name="demo", **options))
        patch.setattr(self.link, "_command", self.command)
        self.starts = 0

    def command(self, address: str) -> tuple[str, ...]:
        self.starts += 1
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        return sys.executable, "-c", script, address

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Link]:
        self.link.start()
        try:
            yield self.link
        finally:
            await self.link.stop()
            assert self.link._folder is None or not self.link._folder.exists()

    async def until(self, what: str, done: Callable[[], bool]) -> None:
        begun = time.monotonic()
        while not done():
            said = f"{what} did not happen: {self.link.state}, {self.starts} starts"
            assert time.monotonic() - begun < PATIENCE, said
            await asyncio.sleep(0.02)

    async def ready(self, starts: int) -> None:
        """Until engine number `starts` is ready."""

        def done() -> bool:
            return self.starts >= starts and self.link.state is EngineState.READY

        await self.until(f"engine {starts}", done)


def ask(link: Link) -> Ticket:
    return link.open([5, 6], SamplingParams(max_tokens=4), asyncio.Queue())


async def lost(ticket: Ticket) -> ApiError:
    """How the ticket fails."""
    _, event = await asyncio.wait_for(ticket.events.get(), PATIENCE)
    assert isinstance(event, ApiError)
    return event


def play(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_faulty_engine_is_replaced_and_its_requests_are_told(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = 5.0 if kind == "engine hangs" else PATIENCE
    engines = Engines(monkeypatch, BROKEN[kind], WHOLE, stall_seconds=stall)

    async def test() -> None:
        async with engines.running() as link:
            await engines.ready(1)
            error = await lost(ask(link))
            assert (error.status, error.code, error.retry_after) == (503, "engine_lost", 5)
            with pytest.raises(ApiError, match="not ready"):
                ask(link)
            await engines.ready(2)
            assert link.restarts == 1
            link.close([ask(link)])

    play(test)


@pytest.mark.parametrize("kind", SLOW_START)
def test_an_engine_that_does_not_start_is_started_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "STARTING_SECONDS", 3.0)
    monkeypatch.setattr(link_module, "STARTING_SHARE", 0)
    engines = Engines(monkeypatch, SLOW_START[kind], WHOLE)

    async def test() -> None:
        async with engines.running() as link:
            await engines.until("another start", lambda: link.restarts > 0)
            monkeypatch.setattr(link_module, "STARTING_SECONDS", PATIENCE)
            await engines.ready(2)
            assert link.restarts == 1

    play(test)


def test_a_checkpoint_that_is_damaged_between_restarts_is_tried_until_it_is_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(monkeypatch, BROKEN["engine ends by itself"], unfit("no shard 3"), WHOLE)

    async def test() -> None:
        async with engines.running() as link:
            await engines.ready(1)
            assert (await lost(ask(link))).code == "engine_lost"
            await engines.until("a damaged checkpoint", lambda: link.unfit == "no shard 3")
            await engines.ready(3)
            assert not link.unfit

    play(test)


def test_a_checkpoint_that_is_damaged_from_the_first_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(monkeypatch, unfit("no shard 3"))

    async def test() -> None:
        async with engines.running() as link:
            await engines.until("unfit", lambda: link.state is EngineState.UNFIT)
            assert engines.starts == 1 and link.unfit == "no shard 3"

    play(test)


@pytest.mark.parametrize(("misled", "kind"), [(True, ConfigError), (False, FreewheelError)])
def test_an_engine_that_an_option_keeps_from_starting_blames_the_option(
    monkeypatch: pytest.MonkeyPatch, misled: bool, kind: type[FreewheelError]
) -> None:
    """So the command's exit code is that of bad arguments."""
    engines = Engines(monkeypatch, unfit("chunk: is too wide", misled))

    async def test() -> None:
        async with engines.running() as link:
            await engines.until("unfit", lambda: link.state is EngineState.UNFIT)
            with pytest.raises(FreewheelError, match="too wide") as caught:
                link.raise_if_unfit()
            assert type(caught.value) is kind

    play(test)


def test_a_server_that_stood_still_itself_does_not_kill_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped and continued, or a machine that slept: nothing was heard, since nobody listened.

    The engine says nothing for so long that its server looks at the clock before it listens.
    """
    engines = Engines(monkeypatch, WHOLE.replace("idle()", "idle(8)"), stall_seconds=60.0)
    stood_still = 0.0

    def monotonic() -> float:
        return time.monotonic() + stood_still

    clock = SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr(link_module, "time", clock)

    async def test() -> None:
        nonlocal stood_still
        async with engines.running() as link:
            await engines.ready(1)
            ticket = ask(link)
            for _ in range(2):
                stood_still += 1000.0
                await asyncio.sleep(2.5)
            assert link.state is EngineState.READY and link.restarts == 0
            assert ticket.id in link.ledger.live
            link.close([ticket])

    play(test)


@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_a_jump_of_the_clock_ends_nothing(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    engines, clock = Engines(monkeypatch, WHOLE), time.time

    async def test() -> None:
        async with engines.running() as link:
            await engines.ready(1)
            ticket = ask(link)
            monkeypatch.setattr(time, "time", lambda: clock() + jump)
            await asyncio.sleep(3)
            assert link.state is EngineState.READY and ticket.id in link.ledger.live
            link.close([ticket])

    play(test)


def test_a_cleared_folder_of_temporary_files_costs_one_engine_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is connected stays so without the file; whoever starts later gets another folder."""
    engines = Engines(monkeypatch, WHOLE)

    async def test() -> None:
        async with engines.running() as link:
            await engines.ready(1)
            assert link._folder is not None and link._folder.stat().st_mode & 0o777 == 0o700
            shutil.rmtree(link._folder)
            await asyncio.sleep(1)
            assert link.state is EngineState.READY
            link.kill()
            await engines.ready(2)

    play(test)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), OSError(12, "No memory")])
def test_no_process_to_be_had_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    engines, start, failures = Engines(monkeypatch, WHOLE), asyncio.create_subprocess_exec, [error]

    async def scarce(*given: Any, **named: Any) -> asyncio.subprocess.Process:
        if failures:
            raise failures.pop()
        return await start(*given, **named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)

    async def test() -> None:
        async with engines.running() as link:
            await engines.ready(2)
            assert link.restarts == 1

    play(test)


@pytest.mark.parametrize("kind", ["full disk", "no folder any more", "whole"])
def test_a_dump_that_cannot_be_written_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    engines = Engines(monkeypatch, BROKEN["engine aborts"], WHOLE, dump_dir=folder)
    if kind == "full disk":
        monkeypatch.setattr(os, "fdopen", lambda fd, _: Full(fd))

    async def test() -> None:
        async with engines.running() as link:
            await engines.ready(1)
            if kind == "no folder any more":
                folder.rmdir()
            assert (await lost(ask(link))).code == "engine_lost"
            await engines.ready(2)

    play(test)
    written = list(folder.iterdir()) if folder.exists() else []
    assert len(written) == (kind == "whole")
    for path in written:
        dump = read_dump(path)
        assert dump.entries[0].order.prompt == [5, 6] and "code -6" in dump.why
        assert json.loads(path.read_text())


class Full:
    """A file on a disk that takes half of what is written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes) -> None:
        os.write(self._descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")
