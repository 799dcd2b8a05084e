# SPDX-License-Identifier: Apache-2.0
"""A process that answers one question at a time, and is ended if it takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from freewheel.errors import StartError
from freewheel.structured.vocabulary import vocabulary_letter

_START_SECONDS = 60.0
"""For the process to come up and to take the vocabulary in."""


class WorkerProcess:
    """Runs a module of this package over one vocabulary. Not thread-safe, but for `close`."""

    def __init__(self, module: str, vocabulary: Sequence[bytes | None]) -> None:
        self._module = module
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        """How often it was started: what an earlier one knew, this one does not."""

    def start(self) -> None:
        """Have it running. Raises StartError, which says why it does not."""
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-m", self._module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.starts += 1
        answer = self._exchange(vocabulary_letter(self._vocabulary), _START_SECONDS)
        if answer is None or "error" in answer:
            self.close()
            raise StartError(str(answer["error"]) if answer else "its process did not start")

    def ask(self, question: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes] | None:
        """The answer and the bytes behind it; None, and no process, if none came in time."""
        self.start()
        answer = self._exchange((json.dumps(question).encode() + b"\n",), seconds)
        if answer is None:
            return None
        assert self._process is not None and self._process.stdout is not None
        count = int(answer.get("bytes", 0))
        return answer, self._process.stdout.read(count) if count else b""

    def close(self) -> None:
        """End it. The next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _exchange(self, letter: tuple[bytes, ...], seconds: float) -> dict[str, Any] | None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            for part in letter:
                process.stdin.write(part)
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # it has gone, or was closed
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self.close()
            return None
        return json.loads(line)
