# SPDX-License-Identifier: Apache-2.0
"""`freewheel serve` in a process of its own, and the few things that tests ask of it."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.waiting import PATIENCE, children, command_of, wait_for

READY = re.compile(r'^ready$|"message": "ready"}$', re.MULTILINE)
"""The line with which a server ends the tale of its start, for people or as an object."""

LISTENING = re.compile(r"serving \S+ at (http://\S+)")
WORKER = b"freewheel.server.worker"
TOLD = "told to end by"
"""Of the line with which it takes note of the first signal."""


def free_port() -> int:
    """One to listen at a little later: not among those that connections are made from."""
    chance = random.Random(os.getpid())
    while True:
        port = chance.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Running:
    """A server, from its start to its end."""

    def __init__(self, log: Path, *options: str, model: str = "demo") -> None:
        self._log = log
        command = [sys.executable, "-m", "freewheel", "serve", model, "--port", "0", *options]
        env = {name: value for name, value in os.environ.items() if name != "FREEWHEEL_API_KEY"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**env, "OMP_NUM_THREADS": "1"}
            )
        self.url = ""

    def __enter__(self) -> Running:
        def found() -> str:
            match = LISTENING.search(self.log)
            return match[1] if match else ""

        try:
            self.url = self.wait_for("listening", found)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()
        self.end()

    def end(self) -> None:
        """At once: two signals, the second behind what the first did, since two may become one."""
        try:
            self.interrupt()
            self.interrupt()
            self.process.wait(PATIENCE)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def interrupt(self) -> None:
        """As Ctrl-C does. The first one is taken note of before this returns."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        wait_for(
            "note of an interrupt", lambda: self.process.poll() is not None or TOLD in self.log
        )

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def wait_for(self, what: str, done: Callable[[], Any]) -> Any:
        """As `wait_for`, while the server runs; what it logged last is shown where it ends."""

        def found() -> Any:
            assert self.process.poll() is None, f"{what}: the server ended\n{self.log[-4000:]}"
            return done()

        return wait_for(what, found, told=lambda: self.log[-4000:])

    def wait_until_ready(self) -> None:
        """The engine answers, and the server has said so: its log holds all of the start.

        The server looks ten times a second whether there is something to say, so /ready is first.
        """
        self.wait_for("ready", lambda: self.http.get("/ready").status_code == 200)
        self.wait_for("ready in the log", lambda: READY.search(self.log))

    def engine_pid(self) -> int:
        """The engine's process, which is there a moment after the server listens."""

        def one() -> int:
            found = [pid for pid in children(self.process.pid) if WORKER in command_of(pid)]
            return found[0] if len(found) == 1 else 0

        return self.wait_for("an engine process", one)

    def wait_for_another_engine(self, old: int) -> None:
        """In the place of process `old`, and ready: just now /ready may still be about that one."""
        self.wait_for("another engine", lambda: self.engine_pid() != old)
        self.wait_until_ready()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def pages(self) -> dict[str, dict[str, int]]:
        return self.http.get("/v1/loads").json()["loads"][0]["pages"]

    def wait_until_idle(self) -> None:
        """No request is left, and every page is free, or kept for the next that begins alike."""

        def idle() -> bool:
            load = self.http.get("/v1/loads").json()["loads"][0]
            return load["num_total_reqs"] == 0 and all(
                pool["free"] + pool["cached"] == pool["total"] for pool in load["pages"].values()
            )

        self.wait_for("all pages free", idle)
