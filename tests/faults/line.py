# SPDX-License-Identifier: Apache-2.0
"""Faults between the two processes, with engines that only pretend to be ones."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from freewheel.config import EngineConfig
from freewheel.engine import Load, PoolLoad
from freewheel.server import link as link_module
from freewheel.server import wire as m
from freewheel.server.failures import ApiError
from freewheel.server.journal import read_dump
from freewheel.server.link import EngineState, Link
from freewheel.server.settings import ServerSettings
from freewheel.server.tickets import Ticket
from freewheel.spec import SamplingParams
from tests.faults.seen import SAME, Seen, Strike
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
    "bad frame": WHOLE.replace("idle()", r"asked(); socket.send(b'\xc1'); idle()"),
    "unknown frame": WHOLE.replace(
        "idle()", f"asked(); socket.send({msgspec.msgpack.encode({'type': 'Hello'})!r}); idle()"
    ),
    "wrong report": WHOLE.replace(
        "idle()",
        f"asked(); socket.send({msgspec.msgpack.encode({'type': 'Progress', 'steps': 3})!r});"
        " idle()",
    ),
    "ends": WHOLE.replace("idle()", "asked(); sys.exit(0)"),
    "aborts": WHOLE.replace("idle()", "asked(); os.abort()"),
    "hangs": WHOLE.replace("idle()", "asked(); time.sleep(1e9)"),
}
"""What an engine does once it is asked for something; the next one is whole."""

SLOW_START = {
    "ends": "raise SystemExit",
    "no memory": "raise MemoryError",
    "hangs": ENGINE + "time.sleep(1e9)",
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


def play(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE))


def patched(request: pytest.FixtureRequest) -> pytest.MonkeyPatch:
    found: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    return found


def told(error: ApiError) -> str:
    return f"{error.status} `{error.code}`"


def broken(kind: str) -> Strike:
    """An engine that does so is replaced, and its requests are told."""

    def strike(request: pytest.FixtureRequest) -> Seen:
        stall, seen = 5.0 if kind == "hangs" else PATIENCE, Seen()
        engines = Engines(patched(request), BROKEN[kind], WHOLE, stall_seconds=stall)

        async def test() -> None:
            async with engines.running() as link:
                await engines.ready(1)
                seen.begun = time.monotonic()
                error = await lost(ask(link))
                assert error.retry_after == 5
                seen.told = told(error)
                with pytest.raises(ApiError, match="not ready"):
                    ask(link)
                await engines.ready(2)
                assert link.restarts == 1
                link.close([ask(link)])
                seen.over(others=SAME)

        play(test)
        return seen

    return strike


def slow_start(kind: str) -> Strike:
    """An engine that does not start is started again."""

    def strike(request: pytest.FixtureRequest) -> Seen:
        patch, seen = patched(request), Seen()
        patch.setattr(link_module, "STARTING_SECONDS", 3.0)
        patch.setattr(link_module, "STARTING_SHARE", 0)
        engines = Engines(patch, SLOW_START[kind], WHOLE)

        async def test() -> None:
            async with engines.running() as link:
                with pytest.raises(ApiError) as refused:
                    ask(link)
                await engines.until("another start", lambda: link.restarts > 0)
                patch.setattr(link_module, "STARTING_SECONDS", PATIENCE)
                await engines.ready(2)
                assert link.restarts == 1
                seen.over(told(refused.value), SAME)

        play(test)
        return seen

    return strike


def damaged_checkpoint(request: pytest.FixtureRequest) -> Seen:
    """Between two starts: it is tried until it is mended."""
    engines = Engines(patched(request), BROKEN["ends"], unfit("no shard 3"), WHOLE)
    seen = Seen()

    async def test() -> None:
        async with engines.running() as link:
            await engines.ready(1)
            assert (await lost(ask(link))).code == "engine_lost"
            await engines.until("a damaged checkpoint", lambda: link.unfit == "no shard 3")
            seen.begun = time.monotonic()
            with pytest.raises(ApiError) as refused:
                ask(link)
            await engines.ready(3)
            assert not link.unfit
            seen.over(told(refused.value), SAME)

    play(test)
    return seen


def stood_still(request: pytest.FixtureRequest) -> Seen:
    """Stopped and continued, or a machine that slept: nothing was heard, since nobody listened.

    The engine says nothing for so long that its server looks at the clock before it listens.
    """
    patch, seen, still = patched(request), Seen(), [0.0]
    engines = Engines(patch, WHOLE.replace("idle()", "idle(8)"), stall_seconds=60.0)
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + still[0], perf_counter=time.perf_counter
    )
    patch.setattr(link_module, "time", clock)

    async def test() -> None:
        async with engines.running() as link:
            await engines.ready(1)
            ticket = ask(link)
            for _ in range(2):
                still[0] += 1000.0
                await asyncio.sleep(2.5)
            assert link.state is EngineState.READY and link.restarts == 0
            assert ticket.id in link.ledger.live
            link.close([ticket])
            seen.over()

    play(test)
    return seen


def clock_jumps(seconds: float) -> Strike:
    def strike(request: pytest.FixtureRequest) -> Seen:
        patch = patched(request)
        engines, clock, seen = Engines(patch, WHOLE), time.time, Seen()

        async def test() -> None:
            async with engines.running() as link:
                await engines.ready(1)
                ticket = ask(link)
                patch.setattr(time, "time", lambda: clock() + seconds)
                await asyncio.sleep(3)
                assert link.state is EngineState.READY and ticket.id in link.ledger.live
                link.close([ticket])
                seen.over()

        play(test)
        return seen

    return strike


def cleared_folder(request: pytest.FixtureRequest) -> Seen:
    """Who is connected stays so without the file; whoever starts later gets another folder."""
    engines, seen = Engines(patched(request), WHOLE), Seen()

    async def test() -> None:
        async with engines.running() as link:
            await engines.ready(1)
            assert link._folder is not None and link._folder.stat().st_mode & 0o777 == 0o700
            shutil.rmtree(link._folder)
            await asyncio.sleep(1)
            assert link.state is EngineState.READY
            seen.begun = time.monotonic()
            link.kill()
            await engines.ready(2)
            seen.over()

    play(test)
    return seen


def no_process(error: OSError) -> Strike:
    """None can be had for the next engine."""

    def strike(request: pytest.FixtureRequest) -> Seen:
        patch, failures, seen = patched(request), [error], Seen()
        engines, start = Engines(patch, WHOLE), asyncio.create_subprocess_exec

        async def scarce(*given: Any, **named: Any) -> asyncio.subprocess.Process:
            if failures:
                raise failures.pop()
            return await start(*given, **named)

        patch.setattr(asyncio, "create_subprocess_exec", scarce)

        async def test() -> None:
            async with engines.running() as link:
                with pytest.raises(ApiError) as refused:
                    ask(link)
                await engines.ready(2)
                assert link.restarts == 1
                seen.over(told(refused.value), SAME)

        play(test)
        return seen

    return strike


def dump(kind: str) -> Strike:
    """An engine aborts, and what it had to do is to be kept in a file. `kind`: "full", "none",
    "whole": the disk, the folder, and neither."""

    def strike(request: pytest.FixtureRequest) -> Seen:
        patch, seen = patched(request), Seen()
        folder: Path = request.getfixturevalue("tmp_path") / "dumps"
        folder.mkdir()
        engines = Engines(patch, BROKEN["aborts"], WHOLE, dump_dir=folder)
        if kind == "full":
            patch.setattr(os, "fdopen", lambda fd, _: Full(fd))

        async def test() -> None:
            async with engines.running() as link:
                await engines.ready(1)
                if kind == "none":
                    folder.rmdir()
                seen.begun = time.monotonic()
                seen.told = told(await lost(ask(link)))
                await engines.ready(2)
                seen.over(others=SAME)

        play(test)
        check_dumps(folder, int(kind == "whole"))
        return seen

    return strike


def check_dumps(folder: Path, count: int) -> None:
    """So many, and each is whole."""
    written = list(folder.iterdir()) if folder.exists() else []
    assert len(written) == count
    for path in written:
        found = read_dump(path)
        assert found.entries[0].order.prompt == [5, 6] and "code -6" in found.why
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
