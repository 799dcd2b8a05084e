# SPDX-License-Identifier: Apache-2.0
"""One streamed request to a server that speaks OpenAI's protocol, timed as a client sees it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from freewheel.bench.prompts import Prompt

Endpoint = Literal["completions", "chat"]
PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
NEEDS_KEY = "set FREEWHEEL_API_KEY, or give --api-key-file"
"""What to do where a server says that it needs a key, or another one."""
MOST_OF_AN_ERROR = 400
"""Characters of an error's text that are kept."""


@dataclass
class Reply:
    """What became of one request. Times in seconds; `start` by the monotonic clock.

    `first`: from sending to the first event with text; `latency`: to the last. `gaps`: between
    events with text, each of which may bring several tokens. `error` is empty if all went well.
    """

    start: float = 0.0
    first: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def token_seconds(self) -> float | None:
        """Seconds for each token after the first, if there were any."""
        rest = self.output_tokens - 1
        return (self.latency - self.first) / rest if rest > 0 else None


@dataclass(frozen=True)
class Asking:
    """What all requests have in common. `fields` go into each body as they are."""

    model: str
    endpoint: Endpoint
    fields: dict[str, Any]

    def body(self, prompt: Prompt) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": prompt.content}
        if self.endpoint == "chat":
            asked = {"messages": [{"role": "user", "content": prompt.content}]}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        named = {"model": self.model, "max_tokens": prompt.max_tokens}
        return {**named, **asked, **streamed, **self.fields}


async def ask(http: httpx.AsyncClient, asking: Asking, prompt: Prompt) -> Reply:
    """Send one request and read its whole stream. Whatever goes wrong is told in the reply."""
    reply = Reply(start=time.monotonic())
    try:
        path = PATHS[asking.endpoint]
        async with http.stream("POST", path, json=asking.body(prompt)) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode("utf-8", "replace")[:MOST_OF_AN_ERROR]
                reply.error = f"status {response.status_code}: {said}"
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    reply.error += f"; {NEEDS_KEY}"
                return reply
            await _read(response, reply)
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {error}"
    return reply


async def _read(response: httpx.Response, reply: Reply) -> None:
    finished, latest = False, reply.start
    async for data in _events(response):
        if data == "[DONE]":
            finished = True
            break
        now, found = time.monotonic(), json.loads(data)
        if "error" in found:
            reply.error = f"in the stream: {json.dumps(found['error'])[:MOST_OF_AN_ERROR]}"
            return
        usage = found.get("usage")
        if usage:
            reply.input_tokens, reply.output_tokens = (
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
        text = "".join(map(_text_of, found.get("choices", ())))
        if not text:
            continue
        if reply.text:
            reply.gaps.append(now - latest)
        else:
            reply.first = now - reply.start
        reply.text += text
        latest, reply.latency = now, now - reply.start
    if not finished:
        reply.error = "the stream ended without [DONE]"
    elif not reply.output_tokens:
        reply.error = "the stream held no usage"


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event; these servers write one line for each."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


def _text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta", {})
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return thought + (delta.get("content") or "")
