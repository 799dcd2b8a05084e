# SPDX-License-Identifier: Apache-2.0
"""The official client of another language gets what Python's gets."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running
from tests.waiting import PATIENCE

CALLS = Path(__file__).parent / "node" / "calls.mjs"
PACKAGE = "openai@7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client and the calls; skips where there is no Node or no registry."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no Node here")
    made = tmp_path_factory.mktemp("node")
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--silent", "--prefix", str(made))
    command = [npm, "install", *options, PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{PACKAGE} cannot be fetched here")
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be fetched here: {done.stderr[-200:]}")
    shutil.copy(CALLS, made)
    return made


@pytest.mark.slow
def test_its_main_calls_work(server: Running, folder: Path) -> None:
    command = ["node", "calls.mjs", server.url]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["models"] == ["demo"]
    ours = server.post("/v1/completions", prompt="Emma was", max_tokens=12, temperature=0).json()
    assert found["text"] == found["streamed"] == ours["choices"][0]["text"]
    assert found["usage"]["completion_tokens"] == 12 == len(found["logprobs"])
    assert all(value <= 0 for value in found["logprobs"])
    assert found["chat"] == found["chatStreamed"] != ""
    assert set(found["formed"]) == {"name", "old"} and isinstance(found["formed"]["old"], bool)
    assert found["response"]
    assert found["refused"] == {"status": 400, "param": "max_tokens", "kind": "BadRequestError"}
    assert found["unknown"]["status"] == 404 and found["unknown"]["kind"] == "NotFoundError"
