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
        return tuple([self._token(call, number, position) for position in range(start, stop)])

    def _token(self, call: Call, number: int, position: int) -> int:
        index, offset = divmod(position, self._block)
        if index >= len(call.blocks):
            return -1 - number
        return offset or self._first(call.blocks[index])

    def _first(self, block_id: int) -> int:
        return block_id + self._block
