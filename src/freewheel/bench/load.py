# SPDX-License-Identifier: Apache-2.0
"""Load on a server over HTTP: an open loop at a rate, or as many requests at once as allowed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import httpx

from freewheel.bench.client import NEEDS_KEY, Asking, Reply, ask
from freewheel.bench.prompts import Prompt, starts
from freewheel.bench.scrape import DraftCounts, scrape
from freewheel.errors import ConfigError, FreewheelError

PATIENCE = 600.0
"""Seconds without a byte after which a request counts as failed."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """`rate`: requests a second, infinite for all at once. `concurrency`: the most that are under
    way; others wait for their turn and their time counts from then. `warm_ups`: requests sent and
    answered first, which do not count. Raises ConfigError if a field is out of range.
    """

    url: str
    api_key: str | None = None
    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int | None = None
    warm_ups: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url: must begin with http:// or https://, got {self.url!r}")
        if self.api_key is not None and not self.api_key.isascii():
            raise ConfigError("api_key: must be ASCII text")
        for name, value in (("request_rate", self.rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(f"{name}: must be above 0, got {value:g}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"max_concurrency: must be at least 1, got {self.concurrency}")
        if self.warm_ups < 0:
            raise ConfigError(f"num_warmups: must be at least 0, got {self.warm_ups}")


@dataclass(frozen=True)
class LoadRun:
    """`duration`: seconds from the first request until the last answer ended. `drafts`: the
    server's own counts of that time; None if it shows none.
    """

    duration: float
    replies: list[Reply]
    drafts: DraftCounts | None


class ServerUnreachable(FreewheelError, RuntimeError):
    """No server answers at the address, or it refuses the key."""


async def served_model(load: Load) -> str:
    """The first model that the server offers. Raises ServerUnreachable."""
    async with _http(load) as http:
        try:
            response = await http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"{load.url}: {error}; start a server there") from error
        if response.status_code != httpx.codes.OK:
            told = f"{load.url}/v1/models: status {response.status_code}"
            if response.status_code == httpx.codes.UNAUTHORIZED:
                had = "needs an API key" if load.api_key is None else "refuses this API key"
                told += f": the server {had}; {NEEDS_KEY}"
            raise ServerUnreachable(told)
        return response.json()["data"][0]["id"]


async def run_load(
    load: Load, asking: Asking, prompts: Sequence[Prompt], ended: Callable[[Reply], None]
) -> LoadRun:
    """Send every prompt; `ended` is told of each answer as it ends.

    Raises ServerUnreachable if a warm-up fails: then nothing that follows would mean anything.
    """
    async with _http(load) as http:
        for prompt in prompts[: load.warm_ups]:
            reply = await ask(http, asking, prompt)
            if reply.error:
                raise ServerUnreachable(f"the warm-up failed: {reply.error}")
        before = await scrape(http)
        begin = time.monotonic()
        replies = await _send_all(http, load, asking, prompts, ended)
        duration = time.monotonic() - begin
        after = await scrape(http)
    counted = None if before is None or after is None else after.since(before)
    return LoadRun(duration, replies, counted)


async def _send_all(
    http: httpx.AsyncClient,
    load: Load,
    asking: Asking,
    prompts: Sequence[Prompt],
    ended: Callable[[Reply], None],
) -> list[Reply]:
    turns = nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)

    async def one(prompt: Prompt) -> Reply:
        async with turns:
            reply = await ask(http, asking, prompt)
        ended(reply)
        return reply

    begin, tasks = time.monotonic(), []
    async with asyncio.TaskGroup() as group:
        times = starts(len(prompts), load.rate, load.burstiness, load.seed)
        for prompt, start in zip(prompts, times, strict=True):
            await asyncio.sleep(max(0.0, begin + start - time.monotonic()))
            tasks.append(group.create_task(one(prompt)))
    return [task.result() for task in tasks]


def _http(load: Load) -> httpx.AsyncClient:
    """A connection a request: none waits for another's. Proxies are not used."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    return httpx.AsyncClient(
        base_url=load.url,
        headers=headers,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=httpx.Timeout(PATIENCE),
        trust_env=False,
    )
