# SPDX-License-Identifier: Apache-2.0
"""The process that renders: a line of JSON in, a line of JSON out, as long as its input is open.

The first line says what to render with: {"kind": "template", "sources", "control_tokens"} or
{"kind": "deepseek_v4"}. Each further line is a conversation; its answer has "pieces" or "error".
The process takes little memory, opens no file once it has begun, and ends if a line takes too long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from freewheel.chat.pieces import Piece

MEMORY = 2 << 30
"""Bytes of address space that the process may take."""

Render = Callable[[Mapping[str, Any]], list[Piece]]


def renderer(begun: Mapping[str, Any]) -> Render:
    """What renders. Raises ModuleNotFoundError for a library that is not installed."""
    if begun["kind"] == "deepseek_v4":
        return import_module("freewheel.chat.recipe").render
    import_module("jinja2.debug")  # loaded by Jinja in the middle of an error otherwise
    template = import_module("freewheel.chat.template")
    return template.Template(begun["sources"], begun["control_tokens"]).render


def say(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    begun = json.loads(sys.stdin.readline())
    seconds = float(begun["seconds"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 10.0)
    try:
        render = renderer(begun)
    except ModuleNotFoundError as missing:
        say({"error": f"needs {missing.name}; pip install '.[server]' in a clone brings it"})
        return
    except ValueError as error:
        say({"error": str(error)})
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    say({})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer: dict[str, Any] = {"pieces": render(json.loads(line))}
        except ValueError as error:  # a refusal, and what the library says no to
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": "takes too much memory to render"}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        say(answer)


if __name__ == "__main__":
    main()
