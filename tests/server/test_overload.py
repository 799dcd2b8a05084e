# SPDX-License-Identifier: Apache-2.0
"""Ten times more requests than the server can serve: those beyond its room are refused before they
are queued, the rest is served. How long a refusal takes is printed, not asserted."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.server.running import Running
from tests.waiting import PATIENCE

REFUSED = re.compile(r'admission_rejections_total\{[^}]*reason="overloaded"\} (\S+)')
ROOM = 32
"""Answers under way or waiting."""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def refused_unqueued(server: Running) -> int:
    """Requests that were refused as they came; one that waited too long is not among them."""
    found = REFUSED.search(server.http.get("/metrics").text)
    return 0 if found is None else int(float(found[1]))


def client_of(server: Running) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=4 * ROOM, max_keepalive_connections=4 * ROOM)
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits, trust_env=False)


async def ask(client: httpx.AsyncClient, number: int) -> int:
    prompt = random.Random(number).choices(range(300, 1000), k=24)
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] == 16
    return answer.status_code


async def capacity(server: Running, seconds: float) -> float:
    """Requests a second, with as many under way as there is room for."""
    end, done = time.monotonic() + seconds, 0

    async def worker(client: httpx.AsyncClient, first: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            assert await ask(client, first + done) == 200
            done += 1

    async with client_of(server) as client:
        await asyncio.gather(*(worker(client, 1000 * n) for n in range(ROOM // 2)))
    return done / seconds


async def flood(server: Running, rate: float, seconds: float) -> Counter[int]:
    """So many requests a second whatever becomes of them; statuses."""
    begun = time.monotonic()
    tasks: list[asyncio.Task[int]] = []
    async with client_of(server) as client:
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            tasks.append(asyncio.create_task(ask(client, number)))
        return Counter(await asyncio.gather(*tasks))


@pytest.mark.exhaustive
def test_ten_times_too_much_is_refused_at_once_and_the_rest_is_served(log: Path) -> None:
    options = ("--max-requests", f"{ROOM}", "--max-batch", "8", "--json-logs")
    with Running(log, *options) as server:
        server.wait_until_ready()
        asyncio.run(flood(server, 20, 3))
        rate = asyncio.run(capacity(server, 8))
        pids = (server.process.pid, server.engine_pid())
        before = [resident_bytes(pid) for pid in pids]
        seen, refused_before = len(server.log), refused_unqueued(server)
        statuses = asyncio.run(flood(server, 10 * rate, 30))
        server.wait_until_idle()
        after = [resident_bytes(pid) for pid in pids]
        lines = [json.loads(line) for line in server.log[seen:].splitlines() if line[:1] == "{"]
        refused = sorted(line["ms"] for line in lines if line.get("status") == 429)
        figures = {
            "capacity": rate,
            "statuses": dict(statuses),
            "refused_ms": [refused[int(share * (len(refused) - 1))] for share in (0.5, 0.99, 1)],
            "resident_growth": [b / a - 1 for a, b in zip(before, after, strict=True)],
        }
        print(json.dumps(figures))
        assert set(statuses) == {200, 429}
        assert statuses[429] > statuses[200]
        assert refused_unqueued(server) - refused_before == statuses[429], figures
        assert all(b < 1.05 * a for a, b in zip(before, after, strict=True)), figures
        assert server.http.get("/ready").json()["restarts"] == 0
