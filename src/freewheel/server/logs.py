# SPDX-License-Identifier: Apache-2.0
"""Log lines on standard error, for people or for programs."""

from __future__ import annotations

import json
import logging
import sys

REQUEST = "{method} {path} {status} {ms} ms [{request_id}]"


class PlainLines(logging.Formatter):
    """Time, level, text. Requests are told in words."""

    def format(self, record: logging.LogRecord) -> str:
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


def set_up_logs(as_json: bool) -> None:
    """Freewheel's and uvicorn's own lines; uvicorn's about start and end only if they warn."""
    handler = logging.StreamHandler(sys.stderr)
    plain = PlainLines("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if as_json else plain)
    for name, level in (("freewheel", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
