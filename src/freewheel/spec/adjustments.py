# SPDX-License-Identifier: Apache-2.0
"""What a request changes about the logits before the choice, as the device takes it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BIASES = 300
"""Entries of `logit_bias` that fit a row of the device state."""

MAX_BAD_WORDS = 64
"""Token sequences of `bad_words` that fit a row."""

MAX_BAD_WORD_TOKENS = 8
"""Tokens of one such sequence."""

USES_PENALTIES, USES_BIASES, USES_ALLOWED, USES_BAD_WORDS = 1, 2, 4, 8
"""Bits of `SequenceState.uses`: what the row's columns hold; without its bit, one is not read."""


@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """Applied to the logits after position p, in this order, from the row's tokens 0 to p alone.

    1. `repetition` r: the logit of each token that stands in the prompt or the output is divided by
       r where it is positive and multiplied by r elsewhere (Keskar et al., 2019).
    2. `frequency` times the token's count in the output, and `presence` if it is there, are taken
       off.
    3. `biases`: (token id, what is added).
    4. Tokens outside `allowed` (None: all are in it) are never chosen, nor is the last token of one
       of `bad_words` when the output ends in the tokens before it.

    `prompt_len`: tokens of the row's prompt; output begins behind it.
    """

    prompt_len: int
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    biases: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def uses(self) -> int:
        """The USES bits of what is there."""
        penalties = bool(self.presence or self.frequency or self.repetition != 1.0)
        return (
            penalties * USES_PENALTIES
            | bool(self.biases) * USES_BIASES
            | (self.allowed is not None) * USES_ALLOWED
            | bool(self.bad_words) * USES_BAD_WORDS
        )
