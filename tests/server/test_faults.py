# SPDX-License-Identifier: Apache-2.0
"""Faults of a running server and its surroundings: what is told to whom, and when it is over.

One server is struck by all of them, one after the other; `test_link_faults.py` and
`tests/program/test_faults.py` have those that need no server, docs/faults.md the list of all.
"""

from __future__ import annotations

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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import Running
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def struck(folder: Path) -> Iterator[Running]:
    (folder / "dumps").mkdir()
    options = ("--stall-seconds", "8", "--drain-seconds", "1", "--max-batch", "6")
    places = ("--admin-socket", str(folder / "admin"), "--dump-dir", str(folder / "dumps"))
    with Running(folder / "log", *options, *places) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def whole(struck: Running) -> Iterator[Running]:
    """Behind each fault the same server answers as before, and every page is home."""
    want = struck.post("/v1/completions", **SHORT).json()["choices"]
    yield struck
    struck.wait_until_ready()
    assert struck.post("/v1/completions", **SHORT).json()["choices"] == want
    struck.wait_until_idle()


def lines_of(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line)


@pytest.mark.slow
def test_an_admin_socket_that_was_removed_disturbs_nobody(whole: Running, folder: Path) -> None:
    with whole.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = lines_of(response)
        next(lines)
        (folder / "admin").unlink()
        for _ in range(5):
            assert "choices" in json.loads(next(lines).removeprefix("data: "))


@pytest.mark.slow
def test_a_server_that_is_stopped_and_continued_goes_on_with_every_stream(whole: Running) -> None:
    engine = whole.engine_pid()
    with whole.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = lines_of(response)
        next(lines)
        whole.process.send_signal(signal.SIGSTOP)
        time.sleep(17)  # more than twice what counts as a stall
        whole.process.send_signal(signal.SIGCONT)
        for _ in range(40):
            assert "choices" in json.loads(next(lines).removeprefix("data: "))
    assert whole.engine_pid() == engine


@pytest.mark.slow
def test_without_file_descriptors_open_streams_go_on_and_new_ones_come_later(
    whole: Running,
) -> None:
    pid = whole.process.pid
    host, port = whole.url.removeprefix("http://").split(":")
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        response = stack.enter_context(whole.http.stream("POST", "/v1/completions", json=LONG))
        lines = lines_of(response)
        next(lines)
        opened = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened + 5, limit[1]))
        for _ in range(20):
            stack.enter_context(socket.create_connection((host, int(port))))
        for _ in range(20):
            assert "choices" in json.loads(next(lines).removeprefix("data: "))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    wait_for("a new answer", lambda: whole.http.get("/health").status_code == 200)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        signal.SIGKILL,
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in (signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP)
        ),
    ],
)
def test_an_engine_that_is_lost_is_replaced_even_where_its_dump_finds_no_room(
    whole: Running, folder: Path, kind: signal.Signals
) -> None:
    """A limit on the size of files stands for a full disk: the dump is left out, whole."""
    pid, old = whole.process.pid, whole.engine_pid()
    before = set((folder / "dumps").iterdir())
    limit = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    full = kind is signal.SIGKILL
    with whole.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = lines_of(response)
        next(lines)
        if full:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, limit[1]))
        os.kill(old, kind)
        *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_lost"
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    whole.wait_for_another_engine(old)
    assert len(set((folder / "dumps").iterdir()) - before) == (0 if full else 1)


@pytest.mark.exhaustive
def test_clients_that_leave_within_any_kind_of_answer_leave_nothing_behind(whole: Running) -> None:
    for path, body in STREAMS.values():
        with whole.http.stream("POST", path, json=body) as response:
            next(lines_of(response))
    whole.wait_until_idle()


@pytest.mark.exhaustive
def test_every_kind_of_stream_is_told_when_the_server_ends_before_it(struck: Running) -> None:
    """The last one here: behind it there is no server any more."""
    struck.wait_until_ready()
    engine = struck.engine_pid()
    told: dict[str, str] = {}
    begun = threading.Barrier(len(STREAMS) + 1)

    def read(name: str) -> None:
        path, body = STREAMS[name]
        with struck.http.stream("POST", path, json=body) as response:
            lines = lines_of(response)
            next(lines)
            begun.wait(PATIENCE)
            *_, told[name] = lines

    readers = [threading.Thread(target=read, args=(name,)) for name in STREAMS]
    for reader in readers:
        reader.start()
    begun.wait(PATIENCE)
    struck.process.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join(PATIENCE)
    assert struck.process.wait(PATIENCE) == 0
    assert set(told) == set(STREAMS)
    for name, last in told.items():
        assert "the server is ending" in last, (name, last)
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.exhaustive
def test_nothing_outlives_a_server_that_is_killed(log: Path) -> None:
    with Running(log, "--max-batch", "2") as running:
        running.wait_until_ready()
        asked = SHORT | {"structured_outputs": {"grammar": 'start: "a" start | "b"'}}
        assert running.post("/v1/completions", **asked).status_code == 200
        everybody = descendants(running.process.pid)
        assert len(everybody) >= 3  # the engine, and its two processes for grammars
        running.process.kill()
        wait_for("the end of all processes", lambda: not any(map(runs, everybody)))


@pytest.mark.parametrize("stream", [True, False])
def test_told_twice_it_ends_at_once_and_without_a_traceback(log: Path, stream: bool) -> None:
    """An answer under way is told; the log says in a line what happened."""
    told: list[str] = []
    with Running(log, "--max-batch", "2", "--drain-seconds", "3600") as running:
        running.wait_until_ready()

        def ask() -> None:
            with running.http.stream(
                "POST", "/v1/completions", json=LONG | {"max_tokens": 8000, "stream": stream}
            ) as response:
                told.extend(response.iter_lines())

        asking = threading.Thread(target=ask)
        asking.start()
        running.wait_for(
            "an answer",
            lambda: running.http.get("/v1/loads").json()["loads"][0]["num_running_reqs"],
        )
        running.interrupt()
        running.interrupt()
        running.process.wait(PATIENCE)
        asking.join(PATIENCE)
        assert "the server is ending" in "".join(told)
        assert "Traceback" not in running.log and "told again" in running.log


@pytest.mark.exhaustive
def test_a_storm_of_signals_ends_the_server_once_and_for_all(log: Path) -> None:
    with Running(log, "--max-batch", "2") as running:
        running.wait_until_ready()
        engine = running.engine_pid()
        address = command_of(engine).split(b"\0")[3].decode()
        for number in range(40):
            kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGWINCH, signal.SIGPIPE)
            if running.process.poll() is None:
                running.process.send_signal(kinds[number % 4])
        running.process.wait(PATIENCE)
        wait_for("the engine's end", lambda: not runs(engine))
        assert not Path(address.removeprefix("ipc://")).parent.exists()


@pytest.mark.exhaustive
def test_a_lost_rank_ends_its_engine_and_another_one_follows(log: Path) -> None:
    options = ("--tp", "2", "--max-batch", "2", "--context-len", "512", "--dtype", "float64")
    with Running(log, *options) as running:
        running.wait_until_ready()
        want = running.post("/v1/completions", **SHORT).json()["choices"]
        old = running.engine_pid()
        ranks = ranks_of(old)
        with running.http.stream(
            "POST", "/v1/completions", json=LONG | {"max_tokens": 400}
        ) as response:
            lines = lines_of(response)
            next(lines)
            os.kill(ranks[0], signal.SIGKILL)
            *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_lost"
        running.wait_for_another_engine(old)
        assert not runs(old)
        assert running.post("/v1/completions", **SHORT).json()["choices"] == want


UNSTARTABLE = {
    "port taken": ("port: cannot listen", ("--port", "{port}")),
    "unreadable key file": ("api_key_file", ("--api-key-file", "{folder}/none")),
    "folder in place of a key file": ("api_key_file", ("--api-key-file", "{folder}")),
    "no folder for dumps": ("dump_dir:", ("--dump-dir", "{folder}/none")),
    "engine option out of range": ("page_size: must be", ("--page-size", "0")),
    "cache too small for a page": ("cache_bytes:", ("--cache-bytes", "4096")),
    "admin socket taken": ("admin_socket:", ("--admin-socket", "{folder}")),
}


@pytest.mark.parametrize("kind", UNSTARTABLE)
def test_what_keeps_a_server_from_starting_is_told_before_anything_is_loaded(
    kind: str, tmp_path: Path
) -> None:
    said, options = UNSTARTABLE[kind]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = [one.format(port=port, folder=tmp_path) for one in options]
        argv = [sys.executable, "-m", "freewheel", "serve", "demo", "--port", "0", *given]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
