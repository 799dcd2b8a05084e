# SPDX-License-Identifier: Apache-2.0
"""The loop: requests in, text out.

May import `freewheel.config`, `.spec`, `.host` and `.runtime`. Must never touch a tensor.
"""

from __future__ import annotations

from freewheel.engine.llm import LLM, Prompt
from freewheel.engine.output import Arrival, Chunk, Metrics, Output, Piece
from freewheel.engine.tokenizer import Tokenizer
from freewheel.runtime import Machine, Resolved, Survey, convert, survey, verify

__all__ = [
    "LLM",
    "Arrival",
    "Chunk",
    "Machine",
    "Metrics",
    "Output",
    "Piece",
    "Prompt",
    "Resolved",
    "Survey",
    "Tokenizer",
    "convert",
    "survey",
    "verify",
]
