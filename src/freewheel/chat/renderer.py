# SPDX-License-Identifier: Apache-2.0
"""The near end of the process that renders prompts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from freewheel.chat.pieces import Piece
from freewheel.errors import RequestError, StartError, UnsupportedModel

SECONDS = 5.0
"""The most that one prompt may take."""

GRACE_SECONDS = 1.0
"""Beyond its time, after which a process that does not end itself is ended."""

START_SECONDS = 60.0
"""For the process to come up."""


class Renderer:
    """Renders in a process of its own: a template can hold up or break nothing else.

    The process starts with the first prompt and again after one that was too much for it.
    """

    def __init__(self, begins: Mapping[str, Any], seconds: float = SECONDS) -> None:
        self._begins = {**begins, "seconds": seconds}
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, given: Mapping[str, Any]) -> list[Piece]:
        """Pieces of a prompt. Raises RequestError for a conversation that is refused,
        UnsupportedModel if nothing can be rendered at all, StartError if no process can be had."""
        with self._lock:
            process = self._started()
            answer = self._exchange(process, given, self._seconds + GRACE_SECONDS)
        if answer is None:
            raise RequestError(
                "messages",
                f"the prompt was not rendered in {self._seconds:g} s, or took too much memory",
            )
        if "error" in answer:
            raise RequestError("messages", str(answer["error"]))
        return [(str(text), bool(control)) for text, control in answer["pieces"]]

    def close(self) -> None:
        """End the process. The next prompt starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        command = [sys.executable, "-m", "freewheel.chat.worker"]
        try:
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for whoever asks, not for this
            )
        except OSError as error:  # no memory, no process, no file descriptor
            raise StartError(f"the process that renders did not start: {error.strerror}") from error
        answer = self._exchange(process, self._begins, START_SECONDS)
        if answer is None or "error" in answer:
            self.close()
            reason = "its process did not start" if answer is None else answer["error"]
            raise UnsupportedModel(f"chat: the encoding of this model cannot be used: {reason}")
        return process

    def _exchange(
        self, process: subprocess.Popen[str], said: Mapping[str, Any], seconds: float
    ) -> dict[str, Any] | None:
        """The answer to a line; None, and no process, if it ended or stood still instead."""
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(said) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer = json.loads(line) if line.endswith("\n") else None
        except (OSError, ValueError):  # it has gone, or was closed, or what came is no answer
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            self.close()
        return answer
