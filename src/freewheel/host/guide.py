# SPDX-License-Identifier: Apache-2.0
"""Grammars that the host follows, as the scheduler sees them: ask early, look in, never wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Guide(Protocol):
    """Follows one answer. Masks are made elsewhere, while rounds go on."""

    def follow(self, answer: Sequence[int]) -> None:
        """Ask for the mask behind `answer`: tokens from the grammar's first on. Never waits."""
        ...

    def mask(self) -> bytes | None:
        """The mask asked for last: int32 words, a bit for each token. None: not there yet."""
        ...

    @property
    def failure(self) -> str | None:
        """Why there will be no mask; None while there may."""
        ...

    def wait(self, seconds: float) -> None:
        """Until the mask is there, or will never be, or the time is over."""
        ...

    def close(self) -> None:
        """Nobody asks any more."""
        ...
