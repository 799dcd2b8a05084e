# SPDX-License-Identifier: Apache-2.0
"""A process of this package from its side: a vocabulary first, then a line for each question.

Each question gets a line of JSON back, and bytes behind it. Imports nothing that may be missing.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from freewheel.structured.vocabulary import read_vocabulary

MEMORY = 4 << 30
"""Bytes of address space that the process may take."""

Answer = Callable[[bytes], tuple[dict[str, Any], bytes]]


def give_up(missing: ModuleNotFoundError) -> NoReturn:
    """End the process, and say what is to be installed."""
    sys.stdin.buffer.readline()
    cure = "pip install '.[structured]' in a clone"
    reason = f"it needs {missing.name}; install Freewheel with its structured extra: {cure}"
    sys.stdout.write(json.dumps({"error": reason}) + "\n")
    sys.exit(1)


def serve(begin: Callable[[list[bytes | None]], Answer]) -> None:
    """Answer until standard input closes. `begin`: from the vocabulary to what answers a line."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    answer = begin(read_vocabulary(stdin))
    stdout.write(b"{}\n")
    stdout.flush()
    for line in stdin:
        # Whoever asks ends this process in time; if the engine is gone, the alarm does.
        signal.setitimer(signal.ITIMER_REAL, float(json.loads(line)["seconds"]))
        said, data = answer(line)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        stdout.write(json.dumps(said).encode() + b"\n" + data)
        stdout.flush()
