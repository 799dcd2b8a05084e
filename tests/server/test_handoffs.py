# SPDX-License-Identifier: Apache-2.0
"""Two servers, one for prompts and one for answers, and a client that does what routers do."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from freewheel import LLM, SamplingParams
from tests.server.running import Running, free_port
from tests.waiting import PATIENCE

OPTIONS = (
    *("--device", "cpu", "--dtype", "float64", "--context-len", "512", "--max-batch", "4"),
    *(
        "--chunk",
        "128",
        "--graph",
        "eager",
        "--kv-seconds",
        "30",
        "--host-cache-gb",
        "0.2",
        "--stall-seconds",
        "600",
        "--queue-seconds",
        "600",
        "--kv-peer",
        "127.0.0.1",
    ),
)


def prompt_of(at: int) -> list[int]:
    """Of 65 to 264 tokens, some of which begin alike."""
    return [(5 * n * n + n * (at // 3) + 7) % 1000 for n in range(65 + 37 * at % 200)]


def body_of(at: int) -> dict[str, Any]:
    return {
        "prompt": prompt_of(at),
        "max_tokens": 6,
        "temperature": 0.9 * (at % 2),
        "seed": at,
        "return_token_ids": True,
    }


def expected(count: int) -> list[list[int]]:
    llm = LLM("demo", device="cpu", dtype="float64", context_len=512, max_batch=4, chunk=128)
    asked = [body_of(at) for at in range(count)]
    params = [
        SamplingParams(temperature=one["temperature"], seed=one["seed"], max_tokens=6)
        for one in asked
    ]
    return [list(o.token_ids) for o in llm.generate([one["prompt"] for one in asked], params)]


class Pair:
    """A prefill engine and a decode engine, and how a router uses them."""

    def __init__(self, folder: Path, kv_port: int) -> None:
        self.kv_port = kv_port
        own = (*OPTIONS, "--kv-port", str(kv_port))
        self.first = Running(folder / "prefill.log", *own, "--role", "prefill")
        self.second = Running(folder / "decode.log", *OPTIONS, "--role", "decode")

    def ask(self, at: int) -> list[int]:
        """Both are asked at once; the answer is the decode engine's, asked again if it is lost."""
        return self.insist(self._together if at % 2 else self._in_turn, at)

    def insist(self, way: Any, at: int) -> list[int]:
        until = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < until
            try:
                return way(body_of(at))
            except (httpx.HTTPError, ConnectionError):
                time.sleep(0.2)  # it is gone, and another comes in its place

    def _together(self, body: dict[str, Any]) -> list[int]:
        """SGLang's way: one room, and both engines at once. The prefill engine may fail."""
        room = secrets.randbits(62)
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.kv_port}
        own = body | where | {"bootstrap_room": room}
        aside = threading.Thread(target=self._prefill, args=(own,))
        aside.start()
        try:
            return tokens_of(self.second.post("/v1/completions", **own))
        finally:
            aside.join()

    def _in_turn(self, body: dict[str, Any]) -> list[int]:
        """vLLM's way: first the prompt, then the answer. Without the first, only the second."""
        asked = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
        told = self._prefill(body | asked)
        more = {} if told is None else {"kv_transfer_params": told["kv_transfer_params"]}
        return tokens_of(self.second.post("/v1/completions", **body | more))

    def _prefill(self, body: dict[str, Any]) -> dict[str, Any] | None:
        try:
            reply = self.first.post("/v1/completions", **body)
            reply.raise_for_status()
        except (httpx.HTTPError, ConnectionError):
            return None
        found = reply.json()
        assert len(found["choices"][0]["token_ids"]) == 1
        return found


def tokens_of(reply: httpx.Response) -> list[int]:
    if reply.status_code < 500:
        assert reply.status_code == 200, reply.text
    reply.raise_for_status()
    return reply.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"), free_port())
    with made.first, made.second:
        made.first.wait_until_ready()
        made.second.wait_until_ready()
        yield made


def test_each_server_says_its_role_and_wire(pair: Pair) -> None:
    assert f"role prefill: hands prompts over at 127.0.0.1:{pair.kv_port}, wire " in pair.first.log
    assert "role decode: fetches prompts from 127.0.0.1:8998, 127.0.0.1 as" in pair.second.log


def kill_engine(server: Running) -> None:
    """The engine process alone; the server starts another."""
    old = server.engine_pid()
    os.kill(old, signal.SIGKILL)
    server.wait_for_another_engine(old)


def counted(server: Running) -> dict[str, float]:
    """`kv_handoffs` by event."""
    lines = server.http.get("/metrics").text.splitlines()
    found = [one for one in lines if one.startswith("freewheel:kv_handoffs_total")]
    return {one.split('event="')[1].split('"')[0]: float(one.split()[-1]) for one in found}


def run(pair: Pair, count: int, struck: Sequence[Running]) -> None:
    """Each of `struck` is killed in turn, after as many answers as before."""
    wanted = expected(count)
    ends = "the engine process ended"
    before_all = {one: one.log.count(ends) for one in (pair.first, pair.second)}
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(pair.ask, at) for at in range(count)]
        for turn, server in enumerate(struck, 1):
            share = turn * count // (len(struck) + 1)
            assert answers[share].result(PATIENCE) == wanted[share]
            if turn == 1:
                assert counted(pair.second)["fetched"] > 0
            kill_engine(server)
        found = [one.result(PATIENCE) for one in answers]
    assert found == wanted
    for server, before in before_all.items():
        ended = server.log.count(ends) - before
        assert ended == struck.count(server), "ended by itself as well"


@pytest.mark.slow
def test_every_answer_is_right_though_each_side_is_killed_once(pair: Pair) -> None:
    run(pair, 24, (pair.first, pair.second))


@pytest.mark.exhaustive
def test_two_hundred_answers_are_right_though_one_side_is_killed_twice(pair: Pair) -> None:
    run(pair, 200, (pair.first, pair.second, pair.first))


@pytest.mark.slow
def test_a_prompt_changes_engines_in_a_chat_and_in_a_stream(pair: Pair) -> None:
    """By the room that SGLang's routers name; the answer is the prefill engine's own."""
    chat = {
        "messages": [{"role": "user", "content": "Who was the king of the country? " * 12}],
        "max_tokens": 6,
        "temperature": 0,
    }
    whole = pair.first.post("/v1/chat/completions", **chat).json()
    before = counted(pair.second)["fetched"]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.kv_port, "bootstrap_room": 5}
    first = pair.first.post("/v1/chat/completions", **chat, **room).json()
    assert first["usage"]["completion_tokens"] == 1
    again = pair.second.post("/v1/chat/completions", **chat, **room).json()
    assert again["choices"][0]["message"] == whole["choices"][0]["message"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert counted(pair.second)["fetched"] == before + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"bootstrap_room": 1}, "bootstrap_host"),
        ({"bootstrap_host": "127.0.0.1"}, "bootstrap_room"),
        ({"bootstrap_host": "10.1.2.3", "bootstrap_room": 1}, "bootstrap_host"),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_room": 1, "n": 2}, "bootstrap_room"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        (
            {"bootstrap_host": "127.0.0.1", "bootstrap_room": 1, "max_tokens": 0, "echo": True},
            "max_tokens",
        ),
    ],
)
def test_a_decode_engine_says_what_is_missing(pair: Pair, more: dict[str, Any], param: str) -> None:
    reply = pair.second.post("/v1/completions", **body_of(0) | more)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
