# SPDX-License-Identifier: Apache-2.0
"""A process that answers one question at a time, and is ended if it takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from freewheel.errors import StartError
from freewheel.structured.vocabulary import vocabulary_letter

_START_SECONDS = 60.0
"""For the process to come up and to take the vocabulary in."""

GRACE_SECONDS = 5.0
"""Beyond its time, after which a process that nobody ends, because the engine has, ends itself."""


class WorkerProcess:
    """Runs a module of this package over one vocabulary. Not thread-safe, but for `close`.

    A process that is gone, stands still or says half of something is ended, and is no answer.
    """

    def __init__(self, module: str, vocabulary: Sequence[bytes | None]) -> None:
        self._command = [sys.executable, "-m", module]
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        """How often it was started: what an earlier one knew, this one does not."""

    def start(self) -> None:
        """Have it running. Raises StartError, which says why it does not."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:  # no memory, no process, no file descriptor
            raise StartError(f"its process did not start: {error.strerror}") from error
        self.starts += 1
        found = self._exchange(vocabulary_letter(self._vocabulary), _START_SECONDS)
        if found is None or "error" in found[0]:
            self.close()
            raise StartError(str(found[0]["error"]) if found else "its process did not start")

    def ask(self, question: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes] | None:
        """The answer and the bytes behind it; None, and no process, if none came in time.

        Raises StartError if the process does not run and cannot be started.
        """
        self.start()
        said = question | {"seconds": seconds + GRACE_SECONDS}
        return self._exchange((json.dumps(said).encode() + b"\n",), seconds)

    def close(self) -> None:
        """End it. The next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _exchange(
        self, letter: tuple[bytes, ...], seconds: float
    ) -> tuple[dict[str, Any], bytes] | None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            for part in letter:
                process.stdin.write(part)
            process.stdin.flush()
            found = _read(process.stdout)
        except (OSError, ValueError):  # it has gone, or was closed, or what came is no answer
            found = None
        finally:
            timer.cancel()
        if found is None:
            self.close()
        return found


def _read(stdout: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """A line, and the bytes that it announces; None if not all of it came."""
    line = stdout.readline()
    if not line.endswith(b"\n"):
        return None
    answer = json.loads(line)
    count = int(answer.get("bytes", 0))
    data = stdout.read(count) if count else b""
    return (answer, data) if len(data) == count else None
