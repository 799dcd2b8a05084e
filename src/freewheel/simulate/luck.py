# SPDX-License-Identifier: Apache-2.0
"""Which drafts are right: drawn beforehand, so that rounds of a row can be counted, not played."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

LOTS = 1 << 12
"""Rounds behind which a row's luck repeats."""

STRIDE = 2531
"""Between where calls begin: about LOTS divided by the golden ratio, and odd, so that of any few
calls in a row no two begin close together."""


class Luck:
    """Every row draws from one shuffled deck of LOTS lots, from a place of its own on.

    What a call draws depends on its number, and on where it was admitted, not on its company: what
    two engines make of one trace differs by the engines. Of all lots
    `acceptance[i]`, to a LOTS-th, say that draft i and those before it are right.

    `right[at]`: how many drafts are right in a round that verifies all; rounds that verify fewer
    have no more. `sums[at]`: tokens that rounds of lots 0 to `at` bring, their own one included.
    Both go through the deck twice, so that a stretch of LOTS rounds from any lot on lies in one
    piece.
    """

    def __init__(self, acceptance: Sequence[float], seed: int) -> None:
        lucky = [round(LOTS * share) for share in acceptance]
        right = list[int]()
        for drafts, lots in enumerate(reversed(lucky)):
            right += [len(lucky) - drafts] * (lots - len(right))
        right += [0] * (LOTS - len(right))
        random.Random(seed).shuffle(right)
        self.right = 2 * right
        self.sums = list(accumulate((right + 1 for right in self.right), initial=0))

    @staticmethod
    def begins(number: int, known: int) -> int:
        """The lot of the first decoding round of a call, admitted with `known` tokens."""
        return (STRIDE * number + known) % LOTS
