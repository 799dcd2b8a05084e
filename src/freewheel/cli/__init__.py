# SPDX-License-Identifier: Apache-2.0
"""The `freewheel` command. Answers go to standard output, everything else to standard error.

May import the engine, `freewheel.config`, `freewheel.spec`, `freewheel.audit`, `freewheel.bench`,
`freewheel.chat`, typer and rich. Exit codes: 0 done, 1 the run failed, 2 bad arguments or a bad
model, 130 interrupted.

Importing this package imports nothing else: PyTorch takes a second, and whoever interrupts that
second should see no traceback.
"""

from __future__ import annotations

import sys
from importlib import import_module

__all__ = ["main"]

INTERRUPTED = 130


def main() -> None:
    """Run the command line; the console script."""
    try:
        app = import_module("freewheel.cli.app")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    vars(app)["main"]()
