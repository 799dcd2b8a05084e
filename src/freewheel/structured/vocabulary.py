# SPDX-License-Identifier: Apache-2.0
"""A vocabulary on its way to a process: what each token says, in bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO


def vocabulary_letter(vocabulary: Sequence[bytes | None]) -> tuple[bytes, bytes]:
    """A line with the lengths (-1: no text), and the bytes of all tokens, one behind the other."""
    lengths = [-1 if token is None else len(token) for token in vocabulary]
    said = b"".join(token for token in vocabulary if token is not None)
    return json.dumps({"lengths": lengths}).encode() + b"\n", said


def read_vocabulary(stream: IO[bytes]) -> list[bytes | None]:
    """What `vocabulary_letter` wrote."""
    lengths = json.loads(stream.readline())["lengths"]
    return [None if length < 0 else stream.read(length) for length in lengths]
