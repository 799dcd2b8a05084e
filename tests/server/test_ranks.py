# SPDX-License-Identifier: Apache-2.0
"""`freewheel serve` with several processes: an end that it is told is no loss of one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.server.running import Running
from tests.waiting import PATIENCE, ranks_of, runs, wait_for

OPTIONS = ("--tp", "2", "--device", "cpu", "--max-batch", "1", "--context-len", "512")


@pytest.mark.parametrize("ready", [False, True])
def test_a_server_of_two_processes_that_is_told_to_end_does_so_without_an_error(
    ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Running(tmp_path / "log", *OPTIONS) as server:
        if ready:
            server.wait_until_ready()
            answer = server.post("/v1/completions", prompt="Emma", max_tokens=4)
            assert answer.status_code == 200
        engine = server.engine_pid()
        (rank,) = server.wait_for("a second rank", lambda: ranks_of(engine))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0
        wait_for("the end of it", lambda: not runs(rank))
        assert "told to end by SIGINT" in server.log
        assert "error" not in server.log.lower() and "gone" not in server.log
    assert [one.name for one in tmp_path.iterdir()] == ["log"]  # no folder is left behind


def test_a_planned_restart_of_two_processes_is_two_lines_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    with Running(tmp_path / "log", *OPTIONS, "--admin-socket", str(path)) as server:
        server.wait_until_ready()
        engine = server.engine_pid()
        (rank,) = server.wait_for("a second rank", lambda: ranks_of(engine))
        seen = len(server.log)
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://admin", trust_env=False) as http:
            assert http.post("/restart").json() == {"lost": 0}
        wait_for("the end of a rank", lambda: not runs(rank))
        server.wait_for_another_engine(engine)
        server.wait_for("the end of the restart", lambda: "ready again" in server.log[seen:])
        told = [line for line in server.log[seen:].splitlines() if '"/ready' not in line]
        told = [line for line in told if "/ready 503" not in line]
        assert len(told) == 2 and "INFO the operator restarts the engine" in told[0], told
        assert "INFO the engine is ready again, after" in told[1], told


def test_a_rank_that_is_lost_between_requests_costs_none_and_is_one_line(tmp_path: Path) -> None:
    """The engine rests: nobody asks it for anything that its other process would have to do."""
    with Running(tmp_path / "log", *OPTIONS) as server:
        server.wait_until_ready()
        engine = server.engine_pid()
        (rank,) = server.wait_for("a second rank", lambda: ranks_of(engine))
        seen = len(server.log)
        os.kill(rank, signal.SIGKILL)
        server.wait_for_another_engine(engine)
        server.wait_for("the end of the restart", lambda: "ready again" in server.log[seen:])
        told = [line for line in server.log[seen:].splitlines() if "/ready" not in line]
        assert len(told) == 3, told
        assert "ERROR tp: rank 1 ended with exit code -9" in told[0]
        assert "ERROR the engine process ended" in told[1]
        assert server.post("/v1/completions", prompt="Emma", max_tokens=4).status_code == 200
