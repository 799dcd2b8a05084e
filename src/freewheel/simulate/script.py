# SPDX-License-Identifier: Apache-2.0
"""Tokens that stand for a trace's blocks: equal where blocks are equal, different where not."""

from __future__ import annotations

from itertools import chain

from freewheel.simulate.trace import Call


class Script:
    """The tokens of a trace's calls, made when they are asked for.

    A block's first token is its id's own, the others are the same in every block: a page is known
    by all tokens before it too, so one that differs is enough. Where a trace does not say what an
    answer is, its tokens are like no other call's.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._rest = tuple(range(1, block))

    def prompt(self, call: Call) -> tuple[int, ...]:
        """The prompt's tokens."""
        count = -(-call.prompt // self._block)
        parts = ((self._first(one), *self._rest) for one in call.blocks[:count])
        return tuple(chain.from_iterable(parts))[: call.prompt]

    def answer(self, call: Call, number: int, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions `start` to `stop` of call `number`, behind its prompt."""
        tokens: list[int] = []
        while start < stop:
            index, offset = divmod(start, self._block)
            if index >= len(call.blocks):
                return (*tokens, *(-1 - number,) * (stop - start))
            end = min(stop, start - offset + self._block)
            if not offset:
                tokens.append(self._first(call.blocks[index]))
            tokens.extend(range(max(offset, 1), offset + end - start))
            start = end
        return tuple(tokens)

    def _first(self, block_id: int) -> int:
        return block_id + self._block
