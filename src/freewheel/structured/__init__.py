# SPDX-License-Identifier: Apache-2.0
"""From a schema, a regular expression or a list of choices to a table that a round can follow.

Compiling runs in a process of its own, with limits of time and memory: no request can hold up or
break the engine. `compiler` talks to it and needs the standard library alone; `worker` and what it
imports need numpy and outlines_core (the extra `structured`).
"""

from __future__ import annotations

from freewheel.structured.compiler import Compiler, Wish

__all__ = ["Compiler", "Wish"]
