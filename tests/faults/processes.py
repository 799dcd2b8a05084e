# SPDX-License-Identifier: Apache-2.0
"""Processes that answer questions may die, stand still or say half of something, at any moment."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from freewheel.chat import Message
from freewheel.chat.renderer import Renderer
from freewheel.errors import RequestError, StartError
from freewheel.structured import Compiler, GuideDesk, Wish
from freewheel.structured.process import WorkerProcess
from tests.faults.seen import ENGINE_LOST, REFUSED, SAME, Seen, Strike
from tests.host.test_encodings import with_template, written
from tests.waiting import PATIENCE, runs, wait_for

BEGIN = """
import json, os, sys, time
first = json.loads(sys.stdin.buffer.readline())
sys.stdin.buffer.read(sum(max(0, n) for n in first["lengths"]))
say = lambda text: (sys.stdout.buffer.write(text), sys.stdout.buffer.flush())
"""
READY = BEGIN + 'say(b"{}\\n")\nsys.stdin.buffer.readline()\n'
MISBEHAVIOUR = {
    "ends": READY,
    "half a line": READY + "say(b'{\"bytes\": 8')",
    "half of the bytes": READY + "say(b'{\"bytes\": 8}\\n1234')",
    "no JSON": READY + 'say(b"what?\\n")\ntime.sleep(9999)',
    "hangs": READY + "time.sleep(9999)",
    "hangs within": READY + "say(b'{\"bytes\": 8}\\n1234')\ntime.sleep(9999)",
    "closes its output": READY + "os.close(1)\ntime.sleep(9999)",
}
VOCABULARY = [bytes([n]) for n in range(256)]
HELLO = [Message("user", "hello")]

NO_ANSWER = "as if it had been killed"


def process(script: str) -> WorkerProcess:
    made = WorkerProcess("none", VOCABULARY)
    made._command = [sys.executable, "-c", script]
    return made


def misbehaves(kind: str) -> Strike:
    """There is no answer, and the next process answers."""

    def strike(_: pytest.FixtureRequest) -> Seen:
        asked = process(MISBEHAVIOUR[kind])
        asked.start()
        seen = Seen()
        if asked.ask({}, seconds=0.5) is None:
            seen.told = NO_ANSWER
        asked._command = [sys.executable, "-c", READY + "say(b'{\"bytes\": 2}\\nok')"]
        assert asked.ask({}, seconds=PATIENCE) == ({"bytes": 2}, b"ok")
        seen.over()
        assert asked.starts == 2
        asked.close()
        return seen

    return strike


@contextmanager
def no_more_files() -> Iterator[None]:
    """As if this process had as many files open as it may."""
    gc.collect()  # or what nobody has any more would be closed meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)  # the next file's number, whatever holes there are
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def no_file_descriptors(_: pytest.FixtureRequest) -> Seen:
    """Requests are refused, and later ones are not."""
    pytest.importorskip("freewheel.structured.worker")
    compiler, desk = Compiler(VOCABULARY, PATIENCE), GuideDesk(VOCABULARY, PATIENCE)
    guide = desk.guide('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}', (0,))
    with no_more_files():
        with pytest.raises(RequestError, match=r"^regex: cannot be compiled: .*did not start"):
            compiler.compile(Wish("regex", "a"))
        guide.follow([])
        wait_for("the failure", lambda: guide.failure)
    assert "did not start" in str(guide.failure)
    seen = Seen(REFUSED)
    assert compiler.compile(Wish("regex", "a"))
    other = desk.guide('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}', (0,))
    other.follow([])
    wait_for("the mask", lambda: other.mask() or other.failure)
    assert other.failure is None
    seen.over()
    compiler.close()
    desk.close()
    return seen


ASKER = """
import sys, threading, time
from freewheel.structured import Compiler, Wish
compiler = Compiler([bytes([n]) for n in range(256)], 2.0)
compiler.compile(Wish("regex", "a"))
print(compiler._process._process.pid, flush=True)
compiler.compile(Wish("regex", "((a{1,99}b{1,99}){1,99}c{1,99}){1,99}"))
"""


def engine_dies_while_compiling(_: pytest.FixtureRequest) -> Seen:
    """Compiling may take minutes, and holds Python's lock: only the system ends it."""
    pytest.importorskip("freewheel.structured.worker")
    asker = subprocess.Popen([sys.executable, "-c", ASKER], stdout=subprocess.PIPE)
    assert asker.stdout is not None
    worker = int(asker.stdout.readline())
    time.sleep(0.5)  # by now it compiles
    seen = Seen(ENGINE_LOST, SAME)  # as whenever an engine dies
    asker.send_signal(signal.SIGKILL)
    asker.communicate()
    wait_for("the end of the compiling process", lambda: not runs(worker))
    return seen.over()


def renderer_is_sent(kind: signal.Signals) -> Strike:
    """It holds up one prompt."""

    def strike(request: pytest.FixtureRequest) -> Seen:
        patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        patch.setattr("freewheel.chat.renderer.Renderer.__init__.__defaults__", (3.0,))
        begun = Renderer._started
        pids: list[int] = []

        def started(self: Renderer) -> subprocess.Popen[str]:
            found = begun(self)
            if len(pids) == 1:
                found.send_signal(kind)
            pids.append(found.pid)
            return found

        patch.setattr(Renderer, "_started", started)
        with closing(with_template(request.getfixturevalue("tmp_path"), "fine")) as chat:
            assert written(chat, HELLO) == "fine"
            seen = Seen(others="wait as long")
            with pytest.raises(RequestError, match="messages: the prompt was not rendered"):
                chat.prompt(HELLO)
            seen.told = REFUSED
            assert written(chat, HELLO) == "fine"
            seen.over()
        assert len(set(pids)) == 2
        return seen

    return strike


def no_renderer(request: pytest.FixtureRequest) -> Seen:
    """Prompts are refused until there is one."""
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")

    def full(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with closing(with_template(request.getfixturevalue("tmp_path"), "fine")) as chat:
        with patch.context() as inner:
            inner.setattr("freewheel.chat.renderer.subprocess.Popen", full)
            with pytest.raises(StartError, match="Too many open files"):
                chat.prompt(HELLO)
        seen = Seen("503 for a chat")
        assert written(chat, HELLO) == "fine"
        return seen.over()
