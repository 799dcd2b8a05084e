# SPDX-License-Identifier: Apache-2.0
"""How many tokens and pages a request needs: at once, to begin decoding, and at its largest."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.errors import CapacityError
from freewheel.host.request import Request
from freewheel.spec import CacheGroup, StepShape


@dataclass(frozen=True)
class Footprint:
    """Sizes in tokens and pages for one engine.

    `decode`: the deepest decoding rectangle; rows have room for it whatever the depth of a round.
    `chunk`: tokens of the
    widest prompt rectangle in use. `group_pages`: pages of each group's pool, scratch page 0
    included. `row_width`: tokens that a row of the device state holds. `lag`: the ladder's.
    """

    groups: tuple[CacheGroup, ...]
    group_pages: tuple[int, ...]
    decode: StepShape
    chunk: int
    row_width: int
    lag: int = 0

    def chunk_tokens(self, start: int, given: int, known: int) -> int:
        """The length that a prompt round of `given` tokens from `start` on may write.

        Drafts follow the last chunk only; the rectangle's unused columns write to scratch.
        """
        drafts = self.decode.depth if start + given == known else 0
        return min(start + given + drafts, self.row_width)

    def decode_tokens(self, upper: int) -> int:
        """The length that a decoding round may write, with at most `upper` tokens computed."""
        return min(upper + self.decode.reach, self.row_width)

    def start_tokens(self, known: int, limit: int) -> int:
        """The length that holds the prompt and the first decoding round after it."""
        return min(self.decode_tokens(known), self.peak_tokens(limit))

    def peak_tokens(self, limit: int) -> int:
        """The length that a request alone needs to reach `limit` tokens.

        Its last round starts at `limit - 2` computed tokens at the latest: one is certain and not
        computed, one is about to be chosen.
        """
        return self.decode_tokens(limit - 2)

    def pages(self, group: CacheGroup, tokens: int) -> int:
        """Pages that `tokens` tokens take at once, if what retention allows is freed in time."""
        if group.retention is None:
            return group.pages_for(tokens)
        stretch = max(self.chunk + self.decode.depth, self.decode.reach)
        touched = (group.retention + self.lag + stretch - 2) // group.page_size + 2
        return min(group.pages_for(tokens), touched)

    def check(self, request: Request) -> None:
        """Raise CapacityError if the request could not run even with the whole pool to itself."""
        for group, pages in zip(self.groups, self.group_pages, strict=True):
            peak = self.pages(group, self.peak_tokens(request.limit))
            if peak < pages:
                continue
            fits = self.pages(group, self.start_tokens(len(request.prompt), request.limit)) < pages
            raise CapacityError(
                "max_tokens" if fits else "prompt",
                f"{len(request.prompt)} prompt tokens, and answers up to a length of "
                f"{request.limit} tokens, take {peak} pages of {group.page_size} tokens in group "
                f"{group.name!r}, which has {pages - 1}; shorten the request or give the engine "
                f"more pages",
            )
