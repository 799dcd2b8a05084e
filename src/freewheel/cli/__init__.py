# SPDX-License-Identifier: Apache-2.0
"""The `freewheel` command. Answers go to standard output, everything else to standard error.

May import the engine, `freewheel.config`, `freewheel.spec`, `freewheel.audit`, `freewheel.bench`,
`freewheel.chat`, typer and rich. Exit codes: 0 done, 1 the run failed, 2 bad arguments or a bad
model, 130 interrupted.
"""

from __future__ import annotations

from freewheel.cli.app import main

__all__ = ["main"]
