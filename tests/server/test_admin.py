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
    refused = operated.server.post("/v1/completions", **body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    asked = operated.server.http.get("/ready")
    for said in (refused.json()["error"]["message"], asked.json()["reason"]):
        assert said == "draining: no new requests are taken until /resume"
    assert operated.order("/resume") == {"draining": False}
    assert operated.server.post("/v1/completions", **body).status_code == 200


def test_a_restart_ends_open_answers_and_brings_another_engine(operated: Operated) -> None:
    stream = Stream(operated.server)
    operated.wait_for_requests(1)
    before, seen = operated.status(), len(operated.server.log)
    assert operated.order("/restart") == {"lost": 1}
    assert stream.end()["error"]["code"] == "engine_lost"
    operated.server.wait_until_ready()
    operated.server.wait_for(
        "word of the engine", lambda: "the engine is ready again" in operated.server.log[seen:]
    )
    after = operated.status()
    assert after["restarts"] == before["restarts"] + 1 and after["pid"] != before["pid"]


ORDERS = ("GET /status", "POST /abort", "POST /flush_cache", "POST /drain", "POST /resume",
          "POST /restart", "POST /log_level")  # fmt: skip
FIELDS = {"POST /abort": ("ids", [1]), "POST /log_level": ("level", "loud")}


def refusal(operated: Operated, order: str, content: bytes) -> dict[str, Any]:
    response = operated.http.request(*order.split(), content=content)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_bad_order_is_told_its_field_and_the_fix_and_changes_nothing(
    operated: Operated, order: str
) -> None:
    before = operated.status()
    error = refusal(operated, order, b'{"more": 1}')
    assert error["param"] == "more" and error["message"].startswith("more: is not a field")
    field, wrong = FIELDS.get(order, ("", 0))
    fix = f'{{"{field}":' if field else "this order has no fields"
    assert fix in error["message"]
    if field:
        error = refusal(operated, order, json.dumps({field: wrong}).encode())
        assert error["param"].split(".")[0] == field
        assert error["message"].startswith(f"{error['param']}: ")
        assert fix in error["message"] and "should" not in error["message"]
    for content in (b"[]", b"5", b"{", b"\xff"):
        assert refusal(operated, order, content)["message"].startswith("body: ")
    assert operated.status() == before


@pytest.mark.parametrize("content", [b"", b"{}"])
@pytest.mark.parametrize("order", ORDERS[:-1])
def test_an_order_needs_no_body_and_no_content_type(
    operated: Operated, order: str, content: bytes
) -> None:
    before = operated.status()["restarts"]
    response = operated.http.request(*order.split(), content=content)
    assert response.status_code == 200, response.text
    if order.endswith("restart"):
        operated.server.wait_for("a restart", lambda: operated.status()["restarts"] > before)
        operated.server.wait_until_ready()
    operated.order("/resume")


def test_a_level_is_required_and_read_without_a_content_type(operated: Operated) -> None:
    for content in (b"", b"{}"):
        error = refusal(operated, "POST /log_level", content)
        assert error["param"] == "level" and error["message"].startswith("level: is required")
    found = operated.http.post("/log_level", content=b'{"level": "info"}')
    assert (found.status_code, found.json()) == (200, {"level": "info"})


def test_another_address_is_refused_in_the_same_form(operated: Operated) -> None:
    for response in (operated.http.post("/abrt"), operated.http.get("/drain")):
        assert response.status_code in (404, 405)
        assert "docs/serving.md" in response.json()["error"]["message"]


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
