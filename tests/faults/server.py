# SPDX-License-Identifier: Apache-2.0
"""Faults of a running server and its surroundings. One server is struck by all but a few."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from freewheel.server import respond
from tests.faults.seen import ENGINE_LOST, NOTHING, SAME, Seen, Strike
from tests.server.running import Running
from tests.server.test_responses import Watched, endless, stays, streamed
from tests.server.test_responses import run as answer
from tests.waiting import PATIENCE, command_of, descendants, ranks_of, runs, wait_for

SHORT = {"prompt": "Emma was", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "Emma was", "max_tokens": 7000, "ignore_eos": True, "stream": True}
TURN: list[dict[str, str]] = [{"role": "user", "content": "Emma was"}]
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", LONG),
    "chat": ("/v1/chat/completions",
             {"messages": TURN, "max_tokens": 7000, "ignore_eos": True, "stream": True}),
    "message": ("/v1/messages", {"messages": TURN, "max_tokens": 6000, "stream": True}),
    "response": ("/v1/responses", {"input": "Emma was", "max_output_tokens": 6000,
                                   "stream": True}),
    "form": ("/v1/completions",
             LONG | {"structured_outputs": {"regex": "(a|[b-z ]){6000}"}, "ignore_eos": False}),
}  # fmt: skip

ENDS = "the connection ends"
ENDING = "an event: the server is ending"
FULL = "429 with Retry-After"
EXIT = "exit code 2, names the option"
MOST = 8
"""Requests that the server takes at a time."""


def running_server(folder: Path) -> Running:
    (folder / "dumps").mkdir()
    options = ("--stall-seconds", "8", "--drain-seconds", "1", "--max-batch", "6")
    places = ("--admin-socket", str(folder / "admin"), "--dump-dir", str(folder / "dumps"))
    patient = ("--max-requests", str(MOST), "--grammar-seconds", "300")
    return Running(folder / "log", *options, *places, *patient)


def server_of(request: pytest.FixtureRequest) -> Running:
    """Behind each fault it answers as before, and every page is home."""
    found: Running = request.getfixturevalue("whole")
    return found


def place_of(request: pytest.FixtureRequest) -> Path:
    """Where its files are."""
    found: Path = request.getfixturevalue("folder")
    return found


def log_of(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue("tmp_path")
    return found / "log"


def lines_of(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line)


@contextmanager
def stream(running: Running) -> Iterator[Iterator[str]]:
    """Lines of an answer that has begun."""
    with running.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = lines_of(response)
        next(lines)
        yield lines


def go_on(lines: Iterator[str], count: int) -> None:
    for _ in range(count):
        assert "choices" in json.loads(next(lines).removeprefix("data: "))


def code_of(line: str) -> str:
    """Of the error that ends a stream, in the list's words."""
    code: str = json.loads(line.removeprefix("data: "))["error"]["code"]
    return ENGINE_LOST if code == "engine_lost" else code


def admin_socket_removed(request: pytest.FixtureRequest) -> Seen:
    running, seen = server_of(request), Seen()
    with stream(running) as lines:
        (place_of(request) / "admin").unlink()
        go_on(lines, 5)
    return seen.over()


def stopped_and_continued(request: pytest.FixtureRequest) -> Seen:
    running, seen = server_of(request), Seen()
    engine = running.engine_pid()
    with stream(running) as lines:
        running.process.send_signal(signal.SIGSTOP)
        time.sleep(17)  # more than twice what counts as a stall
        running.process.send_signal(signal.SIGCONT)
        seen.begun = time.monotonic()
        go_on(lines, 40)
        seen.over()
    assert running.engine_pid() == engine
    return seen


def no_file_descriptors(request: pytest.FixtureRequest) -> Seen:
    """Open streams go on, and new ones come later."""
    running, seen = server_of(request), Seen()
    pid = running.process.pid
    host, port = running.url.removeprefix("http://").split(":")
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        lines = stack.enter_context(stream(running))
        opened = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened + 5, limit[1]))
        for _ in range(20):
            stack.enter_context(socket.create_connection((host, int(port))))
        go_on(lines, 20)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
        seen.begun = time.monotonic()
    wait_for("a new answer", lambda: running.http.get("/health").status_code == 200)
    return seen.over(NOTHING, "new ones wait")


def engine_is_sent(kind: signal.Signals, full: bool = False) -> Strike:
    """`full`: and its dump finds no room: a limit on the size of files stands for a full disk."""

    def strike(request: pytest.FixtureRequest) -> Seen:
        running, dumps = server_of(request), place_of(request) / "dumps"
        pid, old, before = running.process.pid, running.engine_pid(), set(dumps.iterdir())
        limit = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        with stream(running) as lines:
            if full:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, limit[1]))
            seen = Seen()
            os.kill(old, kind)
            *_, last = lines
            seen.told = code_of(last)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        running.wait_for_another_engine(old)
        seen.over(others=SAME)
        assert len(set(dumps.iterdir()) - before) == (0 if full else 1)
        return seen

    return strike


def too_much_to_do(request: pytest.FixtureRequest) -> Seen:
    running = server_of(request)
    with ExitStack() as stack:
        for _ in range(MOST):
            stack.enter_context(begun(running))
        for asked in (SHORT, LONG, SHORT | {"n": 2}):
            refused = running.post("/v1/completions", **asked)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        seen = Seen(FULL)
    running.wait_until_idle()
    assert running.post("/v1/completions", **SHORT).status_code == 200
    seen.over()
    label = 'admission_rejections_total{model_name="demo",reason="overloaded"}'
    assert f"freewheel:{label}" in running.http.get("/metrics").text
    return seen


@contextmanager
def begun(running: Running) -> Iterator[None]:
    """A request that is under way, and whose answer nobody reads; in the end its client leaves."""

    def total() -> int:
        return running.http.get("/v1/loads").json()["loads"][0]["num_total_reqs"]

    before, body = total(), json.dumps(LONG).encode()
    host, port = running.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for("a request under way", lambda: total() == before + 1)
        yield


def slow_reader(request: pytest.FixtureRequest) -> Seen:
    """A client that takes nothing counts as gone."""
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    patch.setattr(respond, "SEND_SECONDS", 0.05)
    watched, seen = Watched(), Seen()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    answer(streamed(watched, endless()), stays, send)
    assert watched.closed == 1
    return seen.over("ends after 60 s")


def clients_leave(request: pytest.FixtureRequest) -> Seen:
    """Within any kind of answer."""
    running, seen = server_of(request), Seen()
    for path, body in STREAMS.values():
        with running.http.stream("POST", path, json=body) as response:
            next(lines_of(response))
    running.wait_until_idle()
    return seen.over()


def server_ends(request: pytest.FixtureRequest) -> Seen:
    """Before any kind of answer does. Behind it there is no server any more."""
    running: Running = request.getfixturevalue("struck")
    running.wait_until_ready()
    engine, told = running.engine_pid(), dict[str, str]()
    started = {name: threading.Event() for name in STREAMS}

    def read(name: str) -> None:
        path, body = STREAMS[name]
        with running.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            lines = lines_of(response)
            next(lines)
            started[name].set()
            *_, told[name] = lines

    # the form takes longest to begin; the last two may end by themselves
    names = sorted(STREAMS, key=("form", "completion", "chat", "response", "message").index)
    readers = [threading.Thread(target=read, args=(name,)) for name in names]
    for name, reader in zip(names, readers, strict=True):
        reader.start()
        assert started[name].wait(PATIENCE)
    os.kill(engine, signal.SIGSTOP)  # or an answer could end before the server does
    seen = Seen(ENDING, SAME)
    running.process.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join(PATIENCE)
    assert running.process.wait(PATIENCE) == 0
    seen.over()
    assert set(told) == set(STREAMS)
    for name, last in told.items():
        assert "the server is ending" in last, (name, last)
    assert not Path(f"/proc/{engine}").exists()
    return seen


def server_killed(request: pytest.FixtureRequest) -> Seen:
    with Running(log_of(request), "--max-batch", "2") as running:
        running.wait_until_ready()
        asked = SHORT | {"structured_outputs": {"grammar": 'start: "a" start | "b"'}}
        assert running.post("/v1/completions", **asked).status_code == 200
        everybody = descendants(running.process.pid)
        assert len(everybody) >= 3  # the engine, and its two processes for grammars
        with stream(running) as lines:
            seen = Seen()
            running.process.kill()
            with pytest.raises(httpx.HTTPError):
                go_on(lines, 10_000)
        wait_for("the end of all processes", lambda: not any(map(runs, everybody)))
        return seen.over(ENDS, SAME)


def storm_of_signals(request: pytest.FixtureRequest) -> Seen:
    with Running(log_of(request), "--max-batch", "2") as running:
        running.wait_until_ready()
        engine, seen = running.engine_pid(), Seen()
        address = command_of(engine).split(b"\0")[3].decode()
        for number in range(40):
            kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGWINCH, signal.SIGPIPE)
            if running.process.poll() is None:
                running.process.send_signal(kinds[number % 4])
        running.process.wait(PATIENCE)
        wait_for("the engine's end", lambda: not runs(engine))
        assert not Path(address.removeprefix("ipc://")).parent.exists()
        return seen.over(ENDS, SAME)


def lost_rank(request: pytest.FixtureRequest) -> Seen:
    options = ("--tp", "2", "--max-batch", "2", "--context-len", "512", "--dtype", "float64")
    with Running(log_of(request), *options) as running:
        running.wait_until_ready()
        want = running.post("/v1/completions", **SHORT).json()["choices"]
        old = running.engine_pid()
        ranks = ranks_of(old)
        with running.http.stream(
            "POST", "/v1/completions", json=LONG | {"max_tokens": 400}
        ) as response:
            lines = lines_of(response)
            next(lines)
            seen = Seen()
            os.kill(ranks[0], signal.SIGKILL)
            *_, last = lines
            seen.told = code_of(last)
        running.wait_for_another_engine(old)
        assert not runs(old)
        assert running.post("/v1/completions", **SHORT).json()["choices"] == want
        return seen.over(others=SAME)


def unstartable(said: str, *options: str) -> Strike:
    """What keeps a server from starting is told before anything is loaded."""

    def strike(request: pytest.FixtureRequest) -> Seen:
        folder: Path = request.getfixturevalue("tmp_path")
        seen = Seen()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            given = [one.format(port=port, folder=folder) for one in options]
            argv = [sys.executable, "-m", "freewheel", "serve", "demo", "--port", "0", *given]
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        assert said in done.stderr and "Traceback" not in done.stderr
        return seen.over(EXIT if done.returncode == 2 else f"exit code {done.returncode}")

    return strike
