# SPDX-License-Identifier: Apache-2.0
"""`freewheel serve` in a process of its own, and the few things that tests ask of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

READY = re.compile(r"^ready$", re.MULTILINE)
"""The line with which a server ends the tale of its start."""

PATIENCE = 120.0
"""Seconds after which something will not happen any more, on however slow a machine."""


def wait_for(what: str, done: Any, patience: float = PATIENCE) -> Any:
    """The first true value of `done()`."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        found = done()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {patience:.0f} s")


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
        pattern = re.compile(r"serving \S+ at (http://\S+)")

        def found() -> str:
            assert self.process.poll() is None, self.log
            match = pattern.search(self.log)
            return match[1] if match else ""

        self.url = wait_for("listening", found)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def wait_until_ready(self) -> None:
        """The engine answers, and the server has said so: its log holds all of the start.

        The server looks ten times a second whether there is something to say, so /ready is first.
        """
        wait_for("ready", lambda: self.http.get("/ready").status_code == 200)
        wait_for("ready in the log", lambda: READY.search(self.log))

    def engine_pid(self) -> int:
        """The one child of the HTTP process."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

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

        wait_for("all pages free", idle)
