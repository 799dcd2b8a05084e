# SPDX-License-Identifier: Apache-2.0
"""A block in a file, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

KEY_BYTES = 16
"""Of the key by which a block is known."""

NO_KEY = bytes(KEY_BYTES)
"""The parent of a block that begins a prompt."""


@dataclass(frozen=True)
class Filed:
    """`parent`: the block before it. `latest`: it has the pages too that a row needs which starts
    at its end."""

    key: bytes
    parent: bytes
    latest: bool
