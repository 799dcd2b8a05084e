# SPDX-License-Identifier: Apache-2.0
"""`freewheel serve` with several processes: an end that it is told is no loss of one of them."""

from __future__ import annotations

import signal
from pathlib import Path

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
