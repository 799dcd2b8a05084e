# SPDX-License-Identifier: Apache-2.0
"""`python -m freewheel` is the `freewheel` command."""

from __future__ import annotations

from freewheel.cli import main

main()
