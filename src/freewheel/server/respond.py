# SPDX-License-Identifier: Apache-2.0
"""Answers that take a while: they end when the client leaves, and errors have an event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from freewheel.server.failures import ApiError, error_bytes
from freewheel.server.generation import Generation

to_json = msgspec.json.encode

SEND_SECONDS = 60.0
"""How long a client may take nothing of an answer before it counts as gone."""


def json_response(value: object, status: int = 200) -> Response:
    """A short answer that is there already."""
    return Response(to_json(value), status, media_type="application/json")


def event(value: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    data = value if isinstance(value, bytes) else to_json(value)
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class Lasting(Response):
    """The response that a generation makes, for as long as the client stays."""

    media_type = "application/json"

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self.generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self.answer(_Patient(send)))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.generation.close()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if work.cancelled():
            return
        error = work.exception()
        if error is not None and not isinstance(error, SlowReader):
            raise error

    async def answer(self, send: Send) -> None:
        """Write it all."""
        raise NotImplementedError


class Whole(Lasting):
    """One JSON body, when every choice has ended."""

    def __init__(self, generation: Generation, body: Callable[[], Any]) -> None:
        super().__init__(generation)
        self._body = body

    async def answer(self, send: Send) -> None:
        await self.generation.finish()
        body = to_json(self._body())  # before the status is said: it may yet fail
        await _start(send, "application/json")
        await send({"type": "http.response.body", "body": body})


class Streamed(Lasting):
    """Server-sent events, one for each round that brought something.

    The status waits for the first token; an error after it has an event and ends the stream.
    """

    def __init__(
        self, generation: Generation, events: AsyncIterator[bytes], anthropic: bool = False
    ) -> None:
        super().__init__(generation)
        self._events = events
        self._anthropic = anthropic

    async def answer(self, send: Send) -> None:
        await self.generation.begin()
        await _start(send, "text/event-stream; charset=utf-8")
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            name = "error" if self._anthropic else None
            data = event(error_bytes(error, self._anthropic), name)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class SlowReader(Exception):
    """The client takes nothing any more."""


class _Patient:
    """Sends, but does not wait for ever. Raises SlowReader."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise SlowReader from None


async def _start(send: Send, kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
