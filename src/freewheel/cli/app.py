# SPDX-License-Identifier: Apache-2.0
"""The commands, and how an error becomes an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import freewheel
from freewheel.cli import (
    audit,
    bench,
    chat,
    convert,
    generate,
    inspect,
    plan,
    replay,
    serve,
    simulate,
)
from freewheel.cli.hinting import Hinting
from freewheel.cli.later import INTERRUPTED
from freewheel.cli.terminal import accept_any_letter, fail, leave_terminal, log_to_terminal
from freewheel.errors import FreewheelError

FAILED = 1

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Inference for models with DeepSeek sparse attention, with no host synchronisation.",
)
app.command("generate", cls=Hinting)(generate.generate)
app.command("chat", cls=Hinting)(chat.chat)
app.command("serve", cls=Hinting)(serve.serve)
app.command("inspect", cls=Hinting)(inspect.inspect)
app.command("plan", cls=Hinting)(plan.plan)
app.command("convert", cls=Hinting)(convert.convert)
app.command("audit", cls=Hinting)(audit.audit)
app.command("replay", cls=Hinting)(replay.replay)
app.command("simulate", cls=Hinting, help=simulate.HELP)(simulate.simulate)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"freewheel {freewheel.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Options that stand before a command."""


def _run() -> None:
    """The command. Raises SystemExit, and what it raises."""
    try:
        app()
    except KeyboardInterrupt:
        leave_terminal()
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            leave_terminal()
        raise


def main() -> None:
    """Run the command line; the console script."""
    if sys.stdout is None:
        fail("standard output is closed")
        sys.exit(FAILED)
    accept_any_letter()
    log_to_terminal()
    try:
        _run()
    except FreewheelError as error:
        fail(str(error))
        sys.exit(FAILED)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # else the reader has left, as `| head` does
            fail(str(error))
        # A later flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
