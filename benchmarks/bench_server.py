# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process costs: its CPU time, and the engine's, for each streamed token.

CPU time rather than wall time, so that other work on the machine hardly matters. Run from the
repository's root: python -m benchmarks.bench_server
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import httpx

from tests.server.running import PATIENCE, Running

STREAMS, TOKENS = 16, 100


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read(client: httpx.AsyncClient, index: int) -> None:
    """One stream, to its end."""
    body = {
        "prompt": f"Emma was {index}",
        "max_tokens": TOKENS,
        "temperature": 0.7,
        "seed": index,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_raw():
            pass


async def read_all(url: str) -> None:
    """All streams at once."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        await asyncio.gather(*(read(client, index) for index in range(STREAMS)))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder) / "log")


def measure(log: Path) -> None:
    """Once to warm up, then once with the clock running."""
    with Running(log, "--max-batch", str(STREAMS)) as server:
        server.wait_until_ready()
        pids = {"HTTP process": server.process.pid, "engine": server.engine_pid()}
        asyncio.run(read_all(server.url))
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        begun = time.perf_counter()
        asyncio.run(read_all(server.url))
        seconds = time.perf_counter() - begun
        for name, pid in pids.items():
            spent = 1000 * (cpu_seconds(pid) - before[name]) / (STREAMS * TOKENS)
            print(f"{name}: {spent:.2f} ms of CPU a token")
        print(f"{STREAMS} streams of {TOKENS} tokens in {seconds:.1f} s")


if __name__ == "__main__":
    main()
