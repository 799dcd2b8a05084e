# SPDX-License-Identifier: Apache-2.0
"""What people see: coloured drafts, progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.text import Text

from freewheel import LLM, Piece
from freewheel.errors import RequestError

ACCEPTED = "green"
"""Style of text that came from an accepted draft."""

messages = Console(stderr=True, highlight=False)
answers = Console(highlight=False, soft_wrap=True, markup=False)


def fail(message: str) -> None:
    """An error, on standard error."""
    messages.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def accept_any_letter() -> None:
    """Letters that standard output's encoding lacks are spelt out; they do not end the run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def is_typed() -> bool:
    """Somebody types the input."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_input(*, line: bool = False) -> str:
    """Standard input, whole or its next line. Raises RequestError if it is closed or not text."""
    if sys.stdin is None:
        raise RequestError("prompt", "standard input is closed")
    try:
        return sys.stdin.readline() if line else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError("prompt", f"standard input is not {error.encoding}: {error}") from error


def write_pieces(pieces: tuple[Piece, ...]) -> None:
    """A stretch of the answer. Accepted drafts are coloured where colours can be shown."""
    if answers.is_terminal and answers.color_system:
        text = Text()
        for piece in pieces:
            text.append(piece.text, style=ACCEPTED if piece.accepted else "")
        answers.print(text, end="")
    else:
        sys.stdout.write("".join(piece.text for piece in pieces))
    sys.stdout.flush()


def write_json(value: object) -> None:
    """One JSON object on one line of standard output, in letters that its encoding has."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    sys.stdout.write(json.dumps(value, ensure_ascii=encoding != "utf8") + "\n")
    sys.stdout.flush()


@contextmanager
def loading(what: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for (bytes read, bytes in all): a bar on a terminal, one line off it."""
    if not messages.is_terminal:
        messages.print(f"loading {what}", markup=False, soft_wrap=True)
        yield lambda done, total: None
        return
    columns = (TextColumn("[dim]{task.description}"), BarColumn(bar_width=30), DownloadColumn())
    with Progress(*columns, console=messages, transient=True) as bar:
        task: TaskID = bar.add_task(escape(f"loading {what}"), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def open_llm(model: str, **options: Any) -> LLM:
    """An engine, loaded under a progress bar; `options` are the fields of EngineConfig."""
    with loading(model) as progress:
        return LLM(model, progress=progress, **options)
