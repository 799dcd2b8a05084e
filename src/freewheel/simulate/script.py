# SPDX-License-Identifier: Apache-2.0
"""Tokens that stand for a trace's blocks: equal where blocks are equal, different where not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from freewheel.host import Request
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


class ScriptNames:
    """Keys of blocks, read off the ids of a trace's blocks: no token is looked at.

    Equal where the script's tokens up to the one behind a block are equal, and only there: all that
    tells them apart are the ids of the trace's blocks that begin there or before, and in an answer
    that the trace does not know, whose answer it is. (`freewheel.host.keys.BlockNames`; a request's
    seed is the number of its call, and none has a salt.)
    """

    def __init__(self, calls: Sequence[Call], block: int, size: int) -> None:
        """`block`: tokens of an id; `size`: of a block of the prefix cache."""
        self._calls, self._block, self._size = calls, block, size
        self._nodes: dict[tuple[bytes, int], bytes] = {}  # behind a node and an id comes a node
        self._heads: dict[int, list[bytes]] = {}  # a node for each of a call's ids
        self._tails = list[bytes]()

    def keys(self, request: Request) -> list[bytes]:
        return self._named(request, request.block_keys, 0)

    def endings(self, request: Request) -> list[bytes]:
        return self._named(request, request.block_endings, 1)

    def ending(self, request: Request, index: int) -> bytes:
        last = ((index + 1) * self._size - 1) // self._block
        return self._head(request.seed, last) + self._tail(index + 1)[index]

    def _named(self, request: Request, names: list[bytes], short: int) -> list[bytes]:
        """Extends names that follow from all tokens up to the one behind a block; `short`: from
        so many fewer."""
        at, size = len(names), self._size
        count = (len(request.prompt) + len(request.output) - 1) // size
        if at >= count:
            return names
        tails = self._tail(count)
        while at < count:
            last = ((at + 1) * size - short) // self._block
            head = self._head(request.seed, last)
            stop = count
            if last < len(self._calls[request.seed].blocks):
                stop = min(count, -(-((last + 1) * self._block + short) // size) - 1)
            names += [head + tail for tail in tails[at:stop]]
            at = stop
        return names

    def _head(self, number: int, index: int) -> bytes:
        """What the ids up to `index` say; behind the last one the answer is the call's alone."""
        heads = self._heads.get(number)
        if heads is None:
            heads, node = [], b""
            for one in self._calls[number].blocks:
                found = self._nodes.get((node, one))
                if found is None:
                    new = b"%d " % len(self._nodes)
                    found = self._nodes[node, one] = new
                node = found
                heads.append(node)
            self._heads[number] = heads
        return heads[index] if index < len(heads) else b"own %d " % number

    def _tail(self, count: int) -> list[bytes]:
        """A name for each of the first blocks, `count` of them at least."""
        while len(self._tails) < count:
            self._tails.append(b"%d" % len(self._tails))
        return self._tails
