# SPDX-License-Identifier: Apache-2.0
"""Packages that need PyTorch, imported when a command first uses one of their names.

PyTorch takes seconds to import. Help and complaints about arguments do without it.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""

STANDARD_ERROR = 2

LAST_WORDS: list[bytes] = []
"""What standard error is owed before such an end; on a terminal, its cursor and a new line."""


class Later:
    """Stands for a module: `Later("freewheel.engine").LLM` imports it, at the first such use."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        with importing():
            module = import_module(self._module)
        return vars(module)[name]


@contextmanager
def importing() -> Iterator[None]:
    """A context for long imports. Ctrl-C ends the process there and then, without a word.

    As an exception it could surface in any library's import, which may turn it into another. What
    is imported lives on, so that Python's collector does not look through it again and again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, collects = signal.signal(signal.SIGINT, _leave), gc.isenabled()
    gc.disable()
    try:
        yield
    except KeyboardInterrupt:
        _leave()
    finally:
        if collects:
            gc.enable()
        signal.signal(signal.SIGINT, before)


@contextmanager
def tidy_end() -> Iterator[None]:
    """A context under whose bar SIGTERM ends the process as ever, once its last words are said."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(*_: object) -> None:
    _say_last_words()
    os._exit(INTERRUPTED)


def _terminate(number: int, _: object) -> None:
    _say_last_words()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _say_last_words() -> None:
    for words in LAST_WORDS:
        os.write(STANDARD_ERROR, words)  # by no other way: a thread may hold the lock of rich's
