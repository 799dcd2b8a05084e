# SPDX-License-Identifier: Apache-2.0
"""Log lines on standard error, for people or for programs."""

from __future__ import annotations

import json
import logging
import sys
import threading
from types import TracebackType
from typing import TextIO

REQUEST = "{method} {path} {status} {ms} ms [{request_id}]"

start = logging.getLogger("freewheel.start")
"""The tale of a start. Whoever waits for its lines waits for whole ones: where lines are for
people, these stand without time and level. No level that an operator sets hides them."""
start.setLevel(logging.INFO)


class PlainLines(logging.Formatter):
    """Time, level, text. Requests are told in words."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == start.name:
            return record.getMessage()
        fields = record.__dict__.get("fields")
        if isinstance(fields, dict):
            record.msg = REQUEST.format(**fields)
            record.args = ()
        return super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = record.__dict__.get("fields")
        line |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs(as_json: bool, stream: TextIO | None = None) -> None:
    """Freewheel's and uvicorn's own lines; uvicorn's about start and end only if they warn.

    `stream`: standard error, unless another is given. As JSON, what libraries log, Python's
    warnings and exceptions that nobody caught are objects too.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    plain = PlainLines("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if as_json else plain)
    for name, level in (("freewheel", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    if as_json:
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
        threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    told = logging.getLogger("freewheel.server")
    told.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _uncaught_in_thread(given: threading.ExceptHookArgs) -> None:
    if given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
        _uncaught(given.exc_type, given.exc_value, given.exc_traceback)
