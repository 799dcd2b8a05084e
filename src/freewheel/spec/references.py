# SPDX-License-Identifier: Apache-2.0
"""References of JSON schemas within their own document."""

from __future__ import annotations


def steps_of(reference: str) -> list[str]:
    """Names from the root on, of a reference such as `#/$defs/x` (a JSON pointer, RFC 6901)."""
    return [step.replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]
