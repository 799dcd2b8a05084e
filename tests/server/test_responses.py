# SPDX-License-Identifier: Apache-2.0
"""Answers end with their client when it leaves, and with an error when that comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from freewheel.server.failures import ApiError, engine_lost, error_bytes
from freewheel.server.generation import Generation
from freewheel.server.respond import Streamed


class Watched:
    """What an answer does with its generation."""

    def __init__(self) -> None:
        self.closed = 0

    async def begin(self) -> None:
        return

    def close(self) -> None:
        self.closed += 1


def streamed(watched: Watched, events: AsyncIterator[bytes]) -> Streamed:
    return Streamed(cast("Generation", watched), events)


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"data: {}\n\n"
        await asyncio.sleep(0)


async def stays() -> dict[str, Any]:
    await asyncio.sleep(3600)
    return {"type": "http.disconnect"}


def run(answer: Streamed, receive: Any, send: Any) -> None:
    asyncio.run(asyncio.wait_for(answer({"type": "http"}, receive, send), 30))


def test_a_client_that_leaves_closes_the_generation() -> None:
    watched, sent = Watched(), []

    async def receive() -> dict[str, Any]:
        while len(sent) < 5:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    run(streamed(watched, endless()), receive, send)
    assert watched.closed == 1 and len(sent) >= 5


def test_an_error_in_a_stream_is_its_last_event() -> None:
    watched, sent = Watched(), []

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise engine_lost()

    async def send(message: Any) -> None:
        sent.append(message)

    run(streamed(watched, events()), stays, send)
    assert sent[0]["status"] == 200
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[0] == b"data: 1\n\n"
    assert bodies[1].startswith(b'data: {"error":{"message":"the engine failed')
    assert bodies[-1] == b"" and not sent[-1].get("more_body")
    assert watched.closed == 1


def test_an_error_before_the_first_token_has_a_status_of_its_own() -> None:
    class Refused(Watched):
        async def begin(self) -> None:
            raise ApiError(429, "busy")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    watched = Refused()
    with pytest.raises(ApiError, match="busy"):
        run(streamed(watched, endless()), stays, send)
    assert sent == [] and watched.closed == 1


def test_an_error_quotes_any_letters_and_not_too_many() -> None:
    body = error_bytes(ApiError(400, "prompt: \ud800" + "x" * 10_000))
    assert len(body) < 800 and b"\\ud800" in body
