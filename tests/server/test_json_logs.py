# SPDX-License-Identifier: Apache-2.0
"""`--json-logs`: whatever is written to the log, and by whom, is one object a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import READY, Running
from tests.waiting import PATIENCE, ranks_of

SMALL = ("--json-logs", "--max-batch", "1", "--context-len", "512")


def objects(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        assert {"time", "level", "logger"} <= one.keys(), one
    return found


def messages(text: str) -> list[str]:
    return [str(one.get("message", "")) for one in objects(text)]


def test_every_line_of_a_servers_life_is_an_object(tmp_path: Path) -> None:
    """Its start, a key file that others may read, a role, a request, a lost rank, its end."""
    keys = tmp_path / "keys"
    keys.write_text("k" * 32 + "\n", "utf-8")
    keys.chmod(0o644)
    options = (*SMALL, "--api-key-file", str(keys), "--role", "prefill", "--kv-port", "0")
    mesh = ("--tp", "2", "--device", "cpu", "--kv-key-file", str(keys))
    with Running(tmp_path / "log", *options, *mesh) as server:
        server.wait_for("ready", lambda: READY.search(server.log))
        assert server.http.get("/v1/models").status_code == 401
        engine = server.engine_pid()
        (rank,) = ranks_of(engine)
        os.kill(rank, signal.SIGKILL)
        key = {"Authorization": f"Bearer {'k' * 32}"}
        server.http.post("/v1/completions", json={"prompt": "Emma", "max_tokens": 1}, headers=key)
        server.wait_for(
            "another engine",
            lambda: any("ready again" in one for one in messages(whole(server.log))),
        )
    told = messages(server.log)
    for part in ("api_key_file:", "kv_key_file:", "serving demo at", "role prefill:"):
        assert any(one.startswith(part) for one in told), part
    assert {"path": "/v1/models", "status": 401}.items() <= next(
        one for one in objects(server.log) if one.get("path") == "/v1/models"
    ).items()
    assert any(one.startswith("told to end by SIGINT") for one in told)


def whole(log: str) -> str:
    """Without a line that is being written."""
    return log[: log.rfind("\n") + 1]


@pytest.mark.parametrize(
    ("options", "part"),
    [(["--max-batch", "0"], "--max-batch"), (["no/such/folder"], "no/such/folder")],
)
def test_an_error_that_ends_it_is_an_object_too(options: list[str], part: str) -> None:
    command = [sys.executable, "-m", "freewheel", "serve", "--json-logs", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 2 and not ended.stdout
    (error,) = objects(ended.stderr)
    assert error["level"] == "error" and part in error["message"]


STRAY = """
import os, subprocess, sys, threading, warnings
from freewheel.server.logs import set_up_logs
from freewheel.server.strays import gather_strays
set_up_logs(as_json=True, stream=gather_strays())
print("printed", file=sys.stderr, flush=True)
os.write(2, b"written " + b"x" * 200_000 + b"\\n\\n")
os.write(2, b'{"time": "t", "level": "info", "logger": "a", "message": "an object"}\\n')
subprocess.run([sys.executable, "-c", "import sys; sys.exit('of a child')"])
warnings.warn("a warning")
import logging
logging.getLogger("asyncio").error("a library's")
thread = threading.Thread(target=lambda: 1 // 0)
thread.start(); thread.join()
os.write(2, b"unended \\xff")
raise ValueError("nobody caught this")
"""


def test_strays_become_objects() -> None:
    """Raw lines, long ones, those of children, warnings, exceptions, one without an end."""
    command = [sys.executable, "-c", STRAY]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    found = objects(ended.stderr)
    told = [one["message"] for one in found]
    long = [one for one in told if one.startswith("written ") or set(one) == {"x"}]
    assert "".join(long) == "written " + "x" * 200_000
    for part in ("printed", "an object", "of a child", "a library's", "unended \\xff"):
        assert part in told, part
    assert any("a warning" in one for one in told)
    for name in ("ZeroDivisionError", "ValueError: nobody caught this"):
        (one,) = [one for one in found if one["message"].startswith(name)]
        assert one["level"] == "critical" and "Traceback" in one["exception"]
