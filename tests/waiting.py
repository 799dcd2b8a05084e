# SPDX-License-Identifier: Apache-2.0
"""What other processes and threads do, waited for however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 300.0
"""Seconds after which something will not happen any more, on however slow a machine."""


def wait_for(
    what: str,
    done: Callable[[], T | None],
    patience: float = PATIENCE,
    told: Callable[[], str] = str,
) -> T:
    """The first true value of `done()`. `told`: what is shown where none comes in time.

    It is asked once more when the time is over: this process may have stood still itself.
    """
    end = time.monotonic() + patience
    while True:
        late = time.monotonic() > end
        if found := done():
            return found
        if late:
            raise AssertionError(f"{what} did not happen within {patience:.0f} s\n{told()}")
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Of a process that may end meanwhile, whichever of its threads started them."""
    found: list[int] = []
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # that thread has ended
                found += map(int, one.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Children, theirs, and so on."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command_of(pid: int) -> bytes:
    """Its command line; nothing once it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def ranks_of(pid: int) -> list[int]:
    """Those that follow the engine in process `pid`."""
    return [one for one in children(pid) if b"--follow" in command_of(one).split(b"\0")]


def runs(pid: int) -> bool:
    """Whether it is there and is no zombie that nobody has waited for."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
