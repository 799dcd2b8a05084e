# SPDX-License-Identifier: Apache-2.0
"""Servers of the demo model on loopback, as a user starts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freewheel import LLM
from tests.server.running import Running

OPTIONS = (
    *("--dtype", "float64", "--max-batch", "8", "--guard"),
    *("--queue-seconds", "600", "--stall-seconds", "600", "--grammar-seconds", "600"),
)
"""On a machine with other work to do, many streams wait longer than a minute."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One for all tests that leave it as it was. float64: company never changes a token."""
    log = tmp_path_factory.mktemp("server") / "log"
    with Running(log, *OPTIONS) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="session")
def llm() -> LLM:
    """What the server's answers are compared with."""
    return LLM("demo", dtype="float64", max_batch=8)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"
