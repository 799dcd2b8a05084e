# SPDX-License-Identifier: Apache-2.0
"""The operator's socket: private, apart from the clients' port, and able to end and renew."""

from __future__ import annotations

import json
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from freewheel.errors import ConfigError
from freewheel.server.admin import open_admin_socket
from tests.server.running import Running
from tests.waiting import PATIENCE

LONG = {"prompt": "Emma was", "max_tokens": 8000, "ignore_eos": True, "stream": True}


class Operated:
    """A server and its operator."""

    def __init__(self, server: Running, path: Path) -> None:
        self.server, self.path = server, path
        transport = httpx.HTTPTransport(uds=str(path))
        self.http = httpx.Client(
            transport=transport, base_url="http://admin", timeout=PATIENCE, trust_env=False
        )

    def order(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def status(self) -> dict[str, Any]:
        return self.http.get("/status").json()

    def wait_for_requests(self, count: int) -> list[dict[str, Any]]:
        def running() -> list[dict[str, Any]]:
            requests = self.status()["requests"]
            begun = [one for one in requests if one["tokens"]]
            return requests if len(begun) == count else []

        return self.server.wait_for(f"{count} answers under way", running)


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("admin")
    path = folder / "socket"
    with Running(folder / "log", "--admin-socket", str(path)) as server:
        server.wait_until_ready()
        yield Operated(server, path)
    assert not path.exists()


class Stream:
    """A long answer, read in a thread until it ends."""

    def __init__(self, server: Running) -> None:
        self.lines: list[str] = []
        self._server = server
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._server.http.stream("POST", "/v1/completions", json=LONG) as response:
            self.lines += [line for line in response.iter_lines() if line]

    def end(self) -> dict[str, Any]:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return json.loads(self.lines[-1].removeprefix("data: "))


def test_only_its_owner_may_open_the_socket(operated: Operated) -> None:
    mode = operated.path.stat().st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600


def test_clients_cannot_reach_what_an_operator_can(operated: Operated) -> None:
    for path in ("/abort", "/flush_cache", "/drain", "/resume", "/restart", "/log_level"):
        assert operated.server.post(path).status_code == 404
    assert operated.server.http.get("/status").status_code == 404
    assert operated.http.post("/v1/completions", json=LONG).status_code == 404


def test_one_request_can_be_ended_and_its_neighbour_goes_on(operated: Operated) -> None:
    streams = [Stream(operated.server) for _ in range(2)]
    first, second = operated.wait_for_requests(2)
    assert operated.order("/abort", ids=[first["id"], "unknown"]) == {"aborted": 1}
    ((left),) = operated.status()["requests"]
    assert left["id"] == second["id"]
    assert operated.order("/abort") == {"aborted": 1}
    for stream in streams:
        assert stream.end()["error"]["code"] == "aborted"
    operated.server.wait_until_idle()


def test_a_flush_forgets_prompts_that_were_kept(operated: Operated) -> None:
    body = {"prompt": list(range(300, 500)), "max_tokens": 1}

    def cached() -> int:
        usage = operated.server.post("/v1/completions", **body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert operated.order("/flush_cache") == {"flushed": True}
    assert cached() == 0


def test_a_drained_server_takes_requests_again_once_told_to(operated: Operated) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert operated.order("/drain") == {"draining": True}
    assert operated.server.post("/v1/completions", **body).status_code == 503
    assert operated.order("/resume") == {"draining": False}
    assert operated.server.post("/v1/completions", **body).status_code == 200


def test_a_restart_ends_open_answers_and_brings_another_engine(operated: Operated) -> None:
    stream = Stream(operated.server)
    operated.wait_for_requests(1)
    before = operated.status()
    assert operated.order("/restart") == {"lost": 1}
    assert stream.end()["error"]["code"] == "engine_lost"
    operated.server.wait_until_ready()
    after = operated.status()
    assert after["restarts"] == before["restarts"] + 1 and after["pid"] != before["pid"]


@pytest.mark.parametrize("body", [{"level": "loud"}, {}, {"level": "info", "more": 1}])
def test_a_bad_order_changes_nothing(operated: Operated, body: dict[str, Any]) -> None:
    assert operated.http.post("/log_level", json=body).status_code == 422
    assert operated.order("/log_level", level="info") == {"level": "info"}


def test_a_taken_path_is_refused_by_name_and_a_stale_socket_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, tmp_path / "no" / "such", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError, match="admin_socket"):
            open_admin_socket(path)
    assert file.read_text() == "mine"
    path = tmp_path / "socket"
    with open_admin_socket(path) as first:
        first.listen()
        with pytest.raises(ConfigError, match="admin_socket"):
            open_admin_socket(path)
    with open_admin_socket(path) as second:
        assert isinstance(second, socket.socket)
