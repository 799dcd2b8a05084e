# SPDX-License-Identifier: Apache-2.0
"""Which line of the user's code is to blame: the innermost one outside PyTorch and this package."""

from __future__ import annotations

import contextlib
import inspect
import os
from dataclasses import dataclass
from types import TracebackType

import torch

_OURS_AND_TORCHS = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.abspath(contextlib.__file__),
    "<frozen ",
    "<__array_function__",
)


@dataclass(frozen=True)
class CallSite:
    """A line of Python: `file` as the interpreter names it, `line` from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


_UNKNOWN = CallSite("<unknown>", 0)


def calling_site() -> CallSite:
    """The user's line that is now calling into PyTorch."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OURS_AND_TORCHS):
        frame = frame.f_back
    return _UNKNOWN if frame is None else CallSite(frame.f_code.co_filename, frame.f_lineno)


def raising_site(error: BaseException) -> CallSite:
    """The user's line from which `error` came."""
    site = _UNKNOWN
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_OURS_AND_TORCHS):
            site = CallSite(file, trace.tb_lineno)
        trace = trace.tb_next
    return site
