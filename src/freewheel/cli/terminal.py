# SPDX-License-Identifier: Apache-2.0
"""What people see: coloured drafts, progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freewheel.cli.columns import Column, Columns
from freewheel.cli.driver import check_early, open_driver
from freewheel.cli.later import LAST_WORDS, Later, tidy_end
from freewheel.config import EngineConfig, find_model
from freewheel.errors import RequestError
from freewheel.spec import StepShape

if TYPE_CHECKING:
    from freewheel import LLM, Chunk, Piece, engine
else:
    engine = Later("freewheel.engine")

LONG_PROMPT = 4
"""Rounds that a prompt may take before its reading has a bar of its own."""
ACCEPTED = "green"
"""Style of text that came from an accepted draft."""
LINE_SECONDS = 10.0
"""How often long work has a line, where it has no bar."""

messages = Console(stderr=True, highlight=False)
answers = Console(highlight=False, soft_wrap=True, markup=False)

if messages.is_terminal:
    LAST_WORDS.append(b"\n" if messages.is_dumb_terminal else b"\x1b[?25h\n")


def fail(message: str) -> None:
    """An error, on standard error."""
    messages.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def table(columns: Sequence[Column], last: str = "") -> Columns:
    """A table for standard output, as wide as its terminal, if it is one."""
    return Columns(columns, last, answers.width if answers.is_terminal else None)


def leave_terminal() -> None:
    """After Ctrl-C: what comes next finds a cursor, and does not follow the `^C`."""
    if messages.is_terminal:
        messages.show_cursor()
        messages.print()


def drop_unwritten() -> None:
    """After an interrupt. One that comes while rich writes leaves in its buffer what it has
    written, which the next print would write once more."""
    for screen in (answers, messages):
        with screen.capture():
            pass


def accept_any_letter() -> None:
    """Letters that standard output's encoding lacks are spelt out; they do not end the run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class TerminalLines(logging.StreamHandler[TextIO]):
    """Log lines on standard error. On a terminal they begin a line of their own: an answer may be
    in the middle of one."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return f"\n{line}" if answers.is_terminal and messages.is_terminal else line


def log_to_terminal() -> None:
    """What the engine's parts have to say, with time and level; a server has lines of its own."""
    logging.getLogger("freewheel").handlers = [TerminalLines()]


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


def write_prompt(prompt: str) -> None:
    """On a terminal the prompt, which the answer continues; nothing off it."""
    if answers.is_terminal:
        answers.print(Text(prompt, style="dim"), end="")
        sys.stdout.flush()


def write_pieces(pieces: tuple[Piece, ...], dim: int = 0) -> None:
    """A stretch of the answer. Accepted drafts are coloured where colours can be shown.

    The first `dim` pieces are dim there.
    """
    if answers.is_terminal and answers.color_system:
        text = Text()
        for index, piece in enumerate(pieces):
            style = "dim" if index < dim else ""
            text.append(piece.text, style=f"{style} {ACCEPTED}" if piece.accepted else style)
        answers.print(text, end="")
    else:
        sys.stdout.write("".join(piece.text for piece in pieces))
    sys.stdout.flush()


def write_text(text: str) -> None:
    """To standard output, as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: object) -> None:
    """One JSON object on one line of standard output, in letters that its encoding has."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    sys.stdout.write(json.dumps(value, ensure_ascii=encoding != "utf8") + "\n")
    sys.stdout.flush()


@contextmanager
def loading(what: str, verb: str = "loading") -> Iterator[Callable[[int, int], None]]:
    """A callback for (bytes read, bytes in all): a bar on a terminal, one line off it."""
    if not messages.is_terminal:
        messages.print(f"{verb} {what}", markup=False, soft_wrap=True)
        yield lambda done, total: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("[dim]{task.description}"),
        _OnceKnown(BarColumn(bar_width=30)),
        _OnceKnown(DownloadColumn()),
        _OnceKnown(TransferSpeedColumn()),
    )
    with tidy_end(), Progress(*columns, console=messages, transient=True) as bar:
        task: TaskID = bar.add_task(escape(f"{verb} {what}"), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _OnceKnown(ProgressColumn):
    """A column that stays empty until it is known how much there is to do."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self.column = column

    def render(self, task: Task) -> RenderableType:
        return Text() if task.total is None else self.column(task)


@contextmanager
def counting(what: str, total: int, done: Callable[[], int], line: str = "") -> Iterator[None]:
    """A bar on a terminal that asks `done` how far the work is.

    Off it `line`, if given, and others where the work is long.
    """
    if not messages.is_terminal:
        with _lines(what, total, done, line) if line else nullcontext():
            yield
        return

    def row() -> Table:
        now = min(done(), total)
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=total, completed=now, width=30)
        grid.add_row(Text(what, style="dim"), bar, Text(f"{now}/{total}"))
        return grid

    with tidy_end(), Live(get_renderable=row, console=messages, transient=True):
        yield


@contextmanager
def _lines(what: str, total: int, done: Callable[[], int], line: str) -> Iterator[None]:
    """What `counting` is off a terminal."""
    messages.print(line, markup=False, soft_wrap=True)
    over = threading.Event()

    def tell() -> None:
        while not over.wait(LINE_SECONDS):
            now = min(done(), total)
            messages.print(f"{what} {now}/{total}", markup=False, soft_wrap=True)

    teller = threading.Thread(target=tell, name="lines", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def open_llm(model: str, *, prompt: str | None = None, **options: Any) -> LLM:
    """An engine, loaded under a progress bar; `options` are the fields of EngineConfig.

    `prompt`: all that it will be asked, so that other graphs need not be made. Raises ConfigError
    for a bad option and CheckpointError for an unknown model before it says that it loads.
    """
    check_early(EngineConfig(model=model, **options))
    find_model(model)
    if options.get("device") != "cpu":
        open_driver()
    with loading(model) as progress:
        llm = engine.LLM(model, progress=progress, **options)
    if llm.built.resolved.graph == "cuda":
        capture(llm, prompt)  # seconds a graph, which an answer should not wait for unexplained
    return llm


def read_first(llm: LLM, tokens: int, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The chunks of an answer; a prompt of many rounds is read under a bar, on a terminal."""
    if tokens <= LONG_PROMPT * llm.config.chunk:
        return chunks
    with counting("reading the prompt", tokens, lambda: llm.computed):
        first = next(chunks)
    return chain((first,), chunks)


def capture(llm: LLM, prompt: str | None = None) -> None:
    """Make every graph of an engine, or those that `prompt` needs.

    Under a bar on a terminal, after one line off it.
    """
    total, made = len(llm.shapes(prompt)), 0

    def count(shape: StepShape) -> None:
        nonlocal made
        del shape
        made += 1

    with counting("capturing graphs", total, lambda: made, f"capturing {total} graphs"):
        llm.capture(count, prompt=prompt)
