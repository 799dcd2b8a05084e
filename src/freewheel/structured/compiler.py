# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the worker: ask for a grammar, wait so long and no longer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from freewheel.errors import RequestError
from freewheel.spec import Grammar

MAX_KEPT = 64
"""Compiled grammars that are kept for further requests."""

_START_SECONDS = 60.0
"""For the worker to come up and to take the vocabulary in."""


@dataclass(frozen=True)
class Wish:
    """What the output must be. `kind`: "json_schema", "regex" or "choice"; `source`: its text.

    The source of choices is a JSON list of strings. `kind` is the name of the request's field.
    """

    kind: str
    source: str


class Compiler:
    """Turns wishes into grammars over one vocabulary. Not thread-safe."""

    def __init__(self, vocabulary: Sequence[bytes | None], seconds: float) -> None:
        """`vocabulary`: what each token says; None for one that no text contains.

        `seconds`: the most that one wish may take.
        """
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._kept: OrderedDict[Wish, Grammar] = OrderedDict()
        self._worker: subprocess.Popen[bytes] | None = None

    def compile(self, wish: Wish) -> Grammar:
        """The wish's grammar. Raises RequestError, naming its field, for one that is refused."""
        if wish in self._kept:
            self._kept.move_to_end(wish)
            return self._kept[wish]
        grammar = self._kept[wish] = self._ask(wish)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return grammar

    def close(self) -> None:
        """Stop the worker. The next wish starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.communicate()

    def _ask(self, wish: Wish) -> Grammar:
        worker = self._started(wish.kind)
        assert worker.stdin is not None and worker.stdout is not None
        question = json.dumps({"kind": wish.kind, "source": wish.source}).encode()
        answer = self._exchange(worker, (question + b"\n",), self._seconds)
        if answer is None:
            raise RequestError(
                wish.kind, f"was not compiled in {self._seconds:g} s, or took too much memory"
            )
        if "error" in answer:
            raise RequestError(wish.kind, str(answer["error"]))
        table = worker.stdout.read(int(answer["bytes"]))
        return Grammar(
            str(answer["key"]),
            int(answer["states"]),
            int(answer["classes"]),
            int(answer["start"]),
            table,
        )

    def _started(self, field: str) -> subprocess.Popen[bytes]:
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        command = [sys.executable, "-m", "freewheel.structured.worker"]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._worker = worker
        lengths = [-1 if token is None else len(token) for token in self._vocabulary]
        said = b"".join(token for token in self._vocabulary if token is not None)
        letter = (json.dumps({"lengths": lengths}).encode() + b"\n", said)
        answer = self._exchange(worker, letter, _START_SECONDS)
        if answer is None or "error" in answer:
            self.close()
            reason = "its process did not start" if answer is None else answer["error"]
            raise RequestError(field, f"cannot be compiled: {reason}")
        return worker

    def _exchange(
        self, worker: subprocess.Popen[bytes], letter: tuple[bytes, ...], seconds: float
    ) -> dict[str, Any] | None:
        """The worker's answer to a letter; None, and no worker, if none came in time."""
        assert worker.stdin is not None and worker.stdout is not None
        timer = threading.Timer(seconds, worker.kill)
        timer.start()
        try:
            for part in letter:
                worker.stdin.write(part)
            worker.stdin.flush()
            line = _line(worker.stdout)
        except OSError:  # it has gone
            line = b""
        finally:
            timer.cancel()
        if not line:
            self.close()
            return None
        return json.loads(line)


def _line(stream: IO[bytes]) -> bytes:
    line = stream.readline()
    return line if line.endswith(b"\n") else b""
