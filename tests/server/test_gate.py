# SPDX-License-Identifier: Apache-2.0
"""Who is let in, decided before anything is parsed. No engine is needed for that."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import cast

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from freewheel.chat import open_chat
from freewheel.config import EngineConfig, find_model
from freewheel.engine import Load, Tokenizer
from freewheel.errors import ConfigError
from freewheel.server import gate
from freewheel.server import wire as m
from freewheel.server.app import ROUTERS, build_app
from freewheel.server.failures import ApiError
from freewheel.server.gate import OPEN, OPEN_FILES, Gate
from freewheel.server.link import EngineState, Link
from freewheel.server.metrics import ServerMetrics
from freewheel.server.serving import Serving
from freewheel.server.settings import ServerSettings

KEY = "a-key-that-nobody-guesses"


class Door:
    """An application without an engine, and requests to it."""

    def __init__(self, **settings: object) -> None:
        chosen = ServerSettings(model_name="demo", **settings)  # pyright: ignore[reportArgumentType]
        self.link = Link(EngineConfig(model="demo"), chosen)
        folder = find_model("demo")
        tokenizer = Tokenizer(folder)
        self.serving = Serving(
            tokenizer=tokenizer,
            chat=open_chat(folder, "deepseek_v32", tokenizer),
            vocab_size=1024,
            link=self.link,
            settings=chosen,
            metrics=ServerMetrics(chosen.metrics_prefix, "demo"),
        )
        self.app: FastAPI = build_app(self.serving)
        self.gate = Gate(self.app, self.serving)

    def ask(
        self,
        path: str,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] = b"",
        host: str = "localhost",
    ) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.gate, raise_app_exceptions=False)
            url = f"http://{host}:8000"
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                return await client.request(method, path, headers=headers, content=content)

        return asyncio.run(run())

    def close(self) -> None:
        asyncio.run(self.link.stop())


@pytest.fixture
def keyed() -> Iterator[Door]:
    door = Door(api_keys=(KEY, "another"), host="0.0.0.0")
    yield door
    door.close()


@pytest.fixture
def local() -> Iterator[Door]:
    door = Door(max_body_bytes=2000)
    yield door
    door.close()


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of everything that the application answers."""
    every = [*app.routes, *(route for router in ROUTERS for route in router.routes)]
    return [
        (method, route.path)
        for route in every
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
    ]


def test_every_route_but_the_open_ones_needs_a_key(keyed: Door) -> None:
    every = routes(keyed.app)
    assert ("POST", "/v1/chat/completions") in every
    assert ("GET", "/openapi.json") in every
    for method, path in every:
        wanted = path.replace("{name:path}", "demo").replace("{name}", "page.js")
        status = keyed.ask(wanted, method).status_code
        if wanted in OPEN or OPEN_FILES.fullmatch(wanted):
            assert status in (200, 503), wanted
        else:
            assert status == 401, wanted


def test_what_is_open_is_health_and_the_pages_own_files() -> None:
    assert {"/health", "/ready", "/ping"} == OPEN
    for path in ("/", "/page/page.js", "/page/page.css"):
        assert OPEN_FILES.fullmatch(path)
    for path in ("/metrics", "/page/../metrics", "/page/a/b.js", "/page/x.json", "//", "/page/"):
        assert not OPEN_FILES.fullmatch(path), path


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"authorization": "Bearer another"},
        {"x-api-key": KEY},
    ],
)
def test_a_right_key_opens(keyed: Door, headers: dict[str, str]) -> None:
    assert keyed.ask("/version", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": KEY},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": ""},
        {"x-api-key": "Bearer " + KEY},
    ],
)
def test_a_wrong_key_does_not(keyed: Door, headers: dict[str, str]) -> None:
    refused = keyed.ask("/v1/models", headers=headers)
    assert refused.status_code == 401
    bare = [v for n, v in headers.items() if n == "x-api-key" or v.startswith("Bearer")]
    error = refused.json()["error"]
    assert error["code"] == "invalid_api_key" and KEY not in error["message"]
    missing = not headers or headers == {"x-api-key": ""}
    assert ("is needed" in error["message"]) == missing
    assert ("none of this server's" in error["message"]) == any(KEY[:-1] in one for one in bare)


@pytest.mark.parametrize("path", ["/health/../v1/models", "/v1/models/", "//v1/models", "/HEALTH"])
def test_no_spelling_of_a_path_avoids_the_key(keyed: Door, path: str) -> None:
    assert keyed.ask(path).status_code in (401, 404)
    assert "demo" not in keyed.ask(path).text


def test_anthropics_clients_are_refused_in_their_own_words(keyed: Door) -> None:
    refused = keyed.ask("/v1/messages", "POST")
    assert refused.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost", None, 200),
        ("127.0.0.1", "http://localhost:8000", 200),
        ("[::1]", "http://[::1]:8000", 200),
        ("localhost", "https://evil.example", 403),
        ("localhost", "null", 403),
        ("localhost", "http://localhost.evil.example", 403),
        ("localhost", "http://localhost@evil.example", 403),
        ("evil.example", None, 403),
    ],
)
def test_another_sites_page_cannot_use_a_server_without_keys(
    local: Door, host: str, origin: str | None, status: int
) -> None:
    headers = {} if origin is None else {"origin": origin}
    assert local.ask("/version", headers=headers, host=host).status_code == status


def test_a_body_over_the_limit_is_refused_unread(local: Door) -> None:
    read: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            read.append(1)
            yield b" " * 500

    json_type = {"content-type": "application/json"}
    refused = local.ask("/v1/completions", "POST", json_type, b" " * 2001)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    refused = local.ask("/v1/completions", "POST", json_type, endless())
    assert refused.status_code == 413
    assert len(read) < 10


def test_a_body_that_never_ends_in_coming_is_given_up(
    local: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    monkeypatch.setattr(gate, "BODY_SECONDS", 0.05)
    refused = local.ask("/v1/completions", "POST", {"content-type": "application/json"}, stuck())
    assert (refused.status_code, refused.json()["error"]["code"]) == (408, "slow_body")


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 40, " 12", "0x10"])
def test_a_length_that_is_no_length_is_refused(local: Door, length: str) -> None:
    headers = {"content-length": length, "content-type": "application/json"}
    assert local.ask("/v1/completions", "POST", headers, b"{}").status_code in (400, 413)


def test_requests_keep_their_ids_and_bad_ids_are_replaced(local: Door) -> None:
    assert (
        local.ask("/version", headers={"x-request-id": "a.b-1"}).headers["x-request-id"] == "a.b-1"
    )
    replaced = local.ask("/version", headers={"x-request-id": "a b\t<script>"})
    assert len(replaced.headers["x-request-id"]) == 16


def test_every_answer_tells_browsers_to_load_nothing_from_elsewhere(local: Door) -> None:
    for path in ("/", "/health", "/nowhere"):
        policy = local.ask(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'self'"), path


def test_without_an_engine_requests_are_503_and_health_is_200(local: Door) -> None:
    assert local.ask("/health").status_code == 200
    assert local.ask("/ready").status_code == 503
    assert {local.ask("/ping", method).status_code for method in ("GET", "HEAD", "POST")} == {503}
    json_type = {"content-type": "application/json"}
    refused = local.ask("/v1/completions", "POST", json_type, b'{"prompt": "x"}')
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


def test_while_it_ends_only_health_answers(local: Door) -> None:
    local.serving.draining = local.serving.ending = True
    assert local.ask("/health").status_code == 200
    assert local.ask("/ready").json()["reason"] == "the server is ending"
    refused = local.ask("/v1/models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


def test_probes_are_no_news_unless_they_fail(
    local: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("freewheel"), "propagate", True)
    caplog.set_level(logging.DEBUG, "freewheel.access")
    news = {"/health": "DEBUG", "/metrics": "DEBUG", "/version": "INFO"}
    for state, level in ((EngineState.STARTING, "DEBUG"), (EngineState.DOWN, "INFO")):
        local.link.state = state
        caplog.clear()
        for path in (*news, "/ready", "/ping"):
            local.ask(path)
        levels = {json.loads(one.message)["path"]: one.levelname for one in caplog.records}
        assert levels == news | {"/ready": level, "/ping": level}, state


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_others_get_in_only_with_a_key_or_when_told_so(host: str) -> None:
    with pytest.raises(ConfigError, match="host"):
        ServerSettings(model_name="demo", host=host)
    assert ServerSettings(model_name="demo", host=host, api_keys=("k",)).local is False
    assert ServerSettings(model_name="demo", host=host, insecure=True).local is False


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_this_machine_needs_no_key(host: str) -> None:
    assert ServerSettings(model_name="demo", host=host).local


@pytest.mark.parametrize(
    "bad",
    [{"port": 70000}, {"queue_tokens": 0}, {"api_keys": (" ",)}, {"metrics_prefix": "a:b"}],
)
def test_settings_out_of_range_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad)).removesuffix("s")):
        ServerSettings(model_name="demo", **bad)  # pyright: ignore[reportArgumentType]


def test_requests_are_sent_with_their_priority_in_the_name_of_their_key() -> None:
    door = Door(api_keys=(KEY, "another"))
    sent: list[m.Submit] = []

    def send(order: m.Order) -> None:
        if isinstance(order, m.Submit):
            sent.append(order)
            door.link.ledger.live[order.id].fail(ApiError(400, "no engine"))

    door.link._send = send  # type: ignore[method-assign]
    door.link.state = EngineState.READY
    door.link.ready = m.Ready(1000, 0, "cpu", "tape", "float32", "none", 0.0, cast("Load", None))
    asked = {"/v1/completions": {"prompt": [5, 6]}, "/v1/responses": {"input": "Hi"}}
    asked["/v1/chat/completions"] = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in asked.items():
        for key, priority in ((KEY, -3), ("another", 7)):
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            content = json.dumps({**body, "priority": priority}).encode()
            assert door.ask(path, "POST", headers, content).status_code == 400
    assert [order.priority for order in sent] == [-3, 7] * 3
    assert [order.tenant for order in sent] == ["key 1", "key 2"] * 3


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/v1/models", "/v1/models"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions/", "/v1/chat/completions"),
        ("/v1/ready", "/ready"),
        ("/get_server_info", "/version"),
        ("/v1/responses/resp_1", "kept:"),
        ("/v1/responses/resp_1/cancel", "kept:"),
    ],
)
def test_an_address_that_is_none_is_told_the_one_that_is_meant(
    local: Door, path: str, meant: str
) -> None:
    found = local.ask(path)
    assert found.status_code == 404
    assert meant in found.json()["error"]["message"].removeprefix("Not Found: ").split()


def test_an_address_that_nobody_means_is_told_none(local: Door) -> None:
    for path in ("/favicon.ico", "/v1/embedding", "/a/b"):
        assert local.ask(path).json()["error"]["message"] == "Not Found", path


def test_a_wrong_method_is_told_the_right_one(local: Door) -> None:
    found = local.ask("/v1/chat/completions")
    assert (found.status_code, found.headers["allow"]) == (405, "POST")
    told = found.json()["error"]["message"]
    assert told == "Method Not Allowed: /v1/chat/completions takes POST"


@pytest.mark.parametrize(
    ("body", "place"),
    [(b'{"prompt": "a", max_tokens: 4}', 17), (b'{"prompt": "a"', 15), (b"", None), (b"[1,", 4)],
)
def test_what_is_no_json_is_told_where(local: Door, body: bytes, place: int | None) -> None:
    found = local.ask("/v1/completions", "POST", {"content-type": "application/json"}, body)
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"] is None
    if place is not None:
        assert error["message"].startswith("body: is not valid JSON: ")
        assert error["message"].endswith(f", at character {place}"), error
