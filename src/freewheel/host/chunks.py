# SPDX-License-Identifier: Apache-2.0
"""Which prompts share a rectangle, and how wide it is."""

from __future__ import annotations

from collections.abc import Sequence

from freewheel.errors import ConfigError
from freewheel.spec import ShapeLadder

PADDING_LIMIT = 1.5
"""A shared rectangle may cost this many times what its prompts cost apart.

Below 4/3, three equal prompts could not share a rectangle of four rows; from 2 on, a short prompt
would double the price of the long chunk that it joined.
"""


def widest_chunk(ladder: ShapeLadder, chunk: int | None) -> int:
    """The widest prompt rectangle of at most `chunk` tokens (None: of any width).

    Raises ConfigError if the ladder has none so narrow.
    """
    widths = sorted({width for _, width in ladder.prefill})
    if chunk is None:
        return widths[-1]
    narrow = [width for width in widths if width <= chunk]
    if not narrow:
        raise ConfigError(f"chunk: must be at least {widths[0]}, the narrowest, got {chunk}")
    return narrow[-1]


def leading(ladder: ShapeLadder, left: int, chunk: int) -> int:
    """How many of `left` tokens to compute next where the last few need a rectangle of their own.

    A rectangle's worth until those fit it: what a round covers is decided by its width. `chunk`:
    the widest rectangle to use.
    """
    if left <= ladder.showing.width:
        return left
    return max(width for _, width in ladder.prefill if width < left and width <= chunk)


def sharing(ladder: ShapeLadder, lengths: Sequence[int]) -> int:
    """How many of these prompts, from the first on, one rectangle takes.

    `lengths`: the tokens that each would have computed; none exceeds the ladder's widest. As many
    as fit, unless padding would cost more than PADDING_LIMIT allows.
    """
    for count in range(min(len(lengths), ladder.max_prefill_batch), 1, -1):
        together = _area(ladder, count, max(lengths[:count]))
        apart = sum(_area(ladder, 1, length) or 0 for length in lengths[:count])
        if together is not None and together <= PADDING_LIMIT * apart:
            return count
    return min(len(lengths), 1)


def _area(ladder: ShapeLadder, rows: int, longest: int) -> int | None:
    """Positions of the smallest rectangle for these rows, or None if it has too few rows."""
    width = min(width for _, width in ladder.prefill if width >= longest)
    batches = [batch for batch, w in ladder.prefill if w == width and batch >= rows]
    return min(batches) * width if batches else None
