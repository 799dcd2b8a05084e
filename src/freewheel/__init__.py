# SPDX-License-Identifier: Apache-2.0
"""Freewheel: inference for models with DeepSeek sparse attention, with no host synchronisation.

>>> from freewheel import LLM, SamplingParams
>>> LLM(model="demo", speculate=3).generate("Emma was", SamplingParams(temperature=0))[0].text

Names are loaded when first used, so that the host's half can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freewheel.engine import LLM, Chunk, Logprobs, Metrics, Output, Piece
    from freewheel.spec import FinishReason, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "freewheel.engine",
    "Chunk": "freewheel.engine",
    "Logprobs": "freewheel.engine",
    "Metrics": "freewheel.engine",
    "Output": "freewheel.engine",
    "Piece": "freewheel.engine",
    "FinishReason": "freewheel.spec",
    "SamplingParams": "freewheel.spec",
}

__all__ = [
    "LLM",
    "Chunk",
    "FinishReason",
    "Logprobs",
    "Metrics",
    "Output",
    "Piece",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'freewheel' has no attribute {name!r}")
    return vars(import_module(_HOMES[name]))[name]


def __dir__() -> list[str]:
    return list(__all__)
