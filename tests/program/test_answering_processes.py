# SPDX-License-Identifier: Apache-2.0
"""A process that answers questions may die, stand still or say half of something, at any moment."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from freewheel.errors import RequestError, StartError
from freewheel.structured import Compiler, GuideDesk, Wish
from freewheel.structured.process import WorkerProcess
from tests.waiting import PATIENCE, runs, wait_for

BEGIN = """
import json, os, sys, time
first = json.loads(sys.stdin.buffer.readline())
sys.stdin.buffer.read(sum(max(0, n) for n in first["lengths"]))
say = lambda text: (sys.stdout.buffer.write(text), sys.stdout.buffer.flush())
"""
READY = BEGIN + 'say(b"{}\\n")\nsys.stdin.buffer.readline()\n'
MISBEHAVIOUR = {
    "ends before it answers": READY,
    "says half a line": READY + "say(b'{\"bytes\": 8')",
    "says half of the bytes": READY + "say(b'{\"bytes\": 8}\\n1234')",
    "says no JSON": READY + 'say(b"what?\\n")\ntime.sleep(9999)',
    "hangs before it answers": READY + "time.sleep(9999)",
    "hangs within the bytes": READY + "say(b'{\"bytes\": 8}\\n1234')\ntime.sleep(9999)",
    "closes its output and stays": READY + "os.close(1)\ntime.sleep(9999)",
}
VOCABULARY = [bytes([n]) for n in range(256)]


def process(script: str) -> WorkerProcess:
    made = WorkerProcess("none", VOCABULARY)
    made._command = [sys.executable, "-c", script]
    return made


@pytest.mark.parametrize("kind", MISBEHAVIOUR)
def test_whatever_it_does_there_is_no_answer_within_the_time_and_the_next_one_answers(
    kind: str,
) -> None:
    asked = process(MISBEHAVIOUR[kind])
    asked.start()
    assert asked.ask({}, seconds=0.5) is None
    asked._command = [sys.executable, "-c", READY + "say(b'{\"bytes\": 2}\\nok')"]
    assert asked.ask({}, seconds=PATIENCE) == ({"bytes": 2}, b"ok")
    assert asked.starts == 2
    asked.close()


@pytest.mark.parametrize(
    "script", ["raise SystemExit", BEGIN, BEGIN + 'say(b\'{"error": "it needs nothing"}\\n\')']
)
def test_a_process_that_does_not_start_says_so(script: str) -> None:
    with pytest.raises(StartError):
        process(script).ask({}, seconds=1)


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


def test_without_file_descriptors_requests_are_refused_and_later_ones_are_not() -> None:
    pytest.importorskip("freewheel.structured.worker")
    compiler, desk = Compiler(VOCABULARY, PATIENCE), GuideDesk(VOCABULARY, PATIENCE)
    guide = desk.guide('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}', (0,))
    with no_more_files():
        with pytest.raises(RequestError, match=r"^regex: cannot be compiled: .*did not start"):
            compiler.compile(Wish("regex", "a"))
        guide.follow([])
        wait_for("the failure", lambda: guide.failure)
    assert "did not start" in str(guide.failure)
    assert compiler.compile(Wish("regex", "a"))
    other = desk.guide('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}', (0,))
    other.follow([])
    wait_for("the mask", lambda: other.mask() or other.failure)
    assert other.failure is None
    compiler.close()
    desk.close()


ASKER = """
import sys, threading, time
from freewheel.structured import Compiler, Wish
compiler = Compiler([bytes([n]) for n in range(256)], 2.0)
compiler.compile(Wish("regex", "a"))
print(compiler._process._process.pid, flush=True)
compiler.compile(Wish("regex", "((a{1,99}b{1,99}){1,99}c{1,99}){1,99}"))
"""


def test_a_grammar_under_way_does_not_outlive_the_engine_that_asked_for_it() -> None:
    """Compiling may take minutes, and holds Python's lock: only the system ends it."""
    pytest.importorskip("freewheel.structured.worker")
    asker = subprocess.Popen([sys.executable, "-c", ASKER], stdout=subprocess.PIPE)
    assert asker.stdout is not None
    worker = int(asker.stdout.readline())
    time.sleep(0.5)  # by now it compiles
    asker.send_signal(signal.SIGKILL)
    asker.communicate()
    wait_for("the end of the compiling process", lambda: not runs(worker))
