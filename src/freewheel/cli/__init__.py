# SPDX-License-Identifier: Apache-2.0
"""The `freewheel` command. Answers go to standard output, everything else to standard error.

May import the engine, `freewheel.config`, `freewheel.spec`, `freewheel.audit`, `freewheel.bench`,
`freewheel.chat`, typer and rich. Exit codes: 0 done, 1 the run failed, 2 bad arguments or a bad
model, 130 interrupted.

Importing this package imports nothing else, and importing its commands imports no PyTorch, which
takes seconds: `later` gets it when a command needs it. Whoever interrupts an import sees no
traceback.
"""

from __future__ import annotations

from importlib import import_module

from freewheel.cli.later import importing

__all__ = ["main"]


def main() -> None:
    """Run the command line; the console script."""
    with importing():
        app = import_module("freewheel.cli.app")
    vars(app)["main"]()
