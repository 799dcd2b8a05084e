# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is while both prompts and decoding have work."""

from __future__ import annotations

WHOLE = 1000
"""A round, in the units in which shares are kept."""


class Interleaving:
    """Gives prompts `share` of the rounds, to a thousandth, as evenly as whole rounds allow.

    0.5: in turns. 0.2: four decoding rounds behind each one for prompts. 0.8: four for prompts
    behind each decoding round. What one kind could not use is not saved up for it.
    """

    def __init__(self, share: float) -> None:
        self._share = max(1, min(WHOLE - 1, round(WHOLE * share)))
        self._claim = 0  # of a round, what prompts are owed

    @property
    def prompts_first(self) -> bool:
        """The next round is for prompts, if they have work."""
        return self._claim >= 0

    def ran(self, prompts: bool, rounds: int = 1) -> None:
        """A round for prompts was launched, or so many of decoding."""
        if prompts:
            self._claim = max(self._claim, 0) - (WHOLE - self._share)
        else:
            self._claim = min(self._claim + rounds * self._share, max(0, 2 * self._share - WHOLE))
