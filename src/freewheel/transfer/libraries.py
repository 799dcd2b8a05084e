# SPDX-License-Identifier: Apache-2.0
"""NIXL's library, which comes under a name for each version of CUDA."""

from __future__ import annotations

from importlib.util import find_spec

LIBRARIES = ("nixl_cu13", "nixl_cu12")
"""In host memory they do the same; the first that is installed serves."""


def installed() -> str | None:
    """The name of the library that is here; None if there is none."""
    return next((name for name in LIBRARIES if find_spec(name) is not None), None)
