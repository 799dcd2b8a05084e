# SPDX-License-Identifier: Apache-2.0
"""From a schema, a regular expression or a list of choices to a table that a round can follow.

Compiling runs in a process of its own, with limits of time and memory: no request can hold up or
break the engine. What no table of bounded size can hold is followed by another such process, token
by token, and its masks travel with the letters of rounds. `compiler` and `guides` talk to them and,
like `serving`, need the standard library alone; `worker`, `guide_worker` and what they import need
numpy, outlines_core and llguidance (the extra `structured`).
"""

from __future__ import annotations

from freewheel.structured.compiler import Compiler, Wish
from freewheel.structured.guides import GuideDesk, HostGuide, can_follow
from freewheel.structured.tags import Tag, tag_tree
from freewheel.structured.tools import (
    DSML_V4,
    DSML_V32,
    GLM,
    JSON_CALLS,
    Tool,
    ToolFormat,
    ToolGrammar,
    tool_grammar,
)

__all__ = [
    "DSML_V4",
    "DSML_V32",
    "GLM",
    "JSON_CALLS",
    "Compiler",
    "GuideDesk",
    "HostGuide",
    "Tag",
    "Tool",
    "ToolFormat",
    "ToolGrammar",
    "Wish",
    "can_follow",
    "tag_tree",
    "tool_grammar",
]
