# SPDX-License-Identifier: Apache-2.0
"""Pages of earlier requests, found again by the tokens that they stand for.

A block is the stretch of tokens after which pages of all groups end. What a block's pages hold
follows from the tokens up to its end and the one behind it, which the drafter's last row has read.
So a block is known by all of these tokens (`keys`). Whoever starts behind a block found by its key
has what it would have computed itself, drafter's rows included.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from freewheel.host.keys import BlockNames, HashedNames
from freewheel.host.pages import PageAllocator
from freewheel.host.request import Request
from freewheel.host.runs import Gone, Match, Run, RunTree
from freewheel.host.tenancy import Tenancy

Pages = tuple[tuple[int, ...], ...]


class Block(NamedTuple):
    """What is kept of one block.

    `pages[g]`: of a group that keeps everything, the block's own pages. `latest[g]`: of a group
    that keeps the latest tokens, the pages that a row needs which starts at the block's end; None
    if they are not kept, and then the block only leads to others. Both are empty where the group
    is of the other sort.
    """

    key: bytes
    pages: Pages
    latest: Pages | None


class Watcher(Protocol):
    """Who is told what comes and goes."""

    def kept(self, key: bytes) -> None:
        """The block is new, or more of it is kept than before."""
        ...

    def leaving(self, key: bytes) -> None:
        """Pages of the block are about to be dropped, because they are wanted elsewhere."""
        ...

    def forget(self, keys: Sequence[bytes], gone: Sequence[bytes]) -> None:
        """What these blocks hold, and whatever lies behind them, is not to be found again.

        `gone`: those of them that were here."""
        ...

    def clear(self) -> None:
        """Nothing is to be found again."""
        ...


class PrefixCache:
    """Blocks by key; the least recently used go first when a group runs short of pages.

    `secret` keys the hash, so that nobody can construct two prompts with the same blocks. Tenants
    with different salts share nothing.
    """

    def __init__(self, pools: Sequence[PageAllocator], secret: bytes | None = None) -> None:
        self._pools = tuple(pools)
        self._groups = tuple(pool.group for pool in pools)
        self.block_size = math.lcm(*(group.page_size for group in self._groups))
        secret = secrets.token_bytes(32) if secret is None else secret
        self.names: BlockNames = HashedNames(self.block_size, secret)
        self.watcher: Watcher | None = None
        self._tree = RunTree(
            [
                self.block_size // group.page_size if group.retention is None else 0
                for group in self._groups
            ]
        )
        # Where some groups keep the latest tokens alone, nobody can start a token before the end.
        self._splits = all(group.retention is None for group in self._groups)
        # Where all keep everything, a row can start behind any block, and none stands here.
        self._latest: OrderedDict[bytes, Pages] = OrderedDict()
        self._doubted: set[bytes] = set()
        """The last one to end that had found these blocks here went wrong."""

    def __len__(self) -> int:
        return len(self._tree)

    def match(self, request: Request, most: int) -> Match:
        """The longest run of blocks, from the request's first token on, behind which it can start.

        Of its first `most` tokens. At least one certain token is left to compute: a block is known
        by the token behind it.
        """
        found = self.found(self.keys(request)[: most // self.block_size])
        count = len(found)
        while count and not self._splits and found.keys[count - 1] not in self._latest:
            count -= 1
        return found if count == len(found) else self.found(found.keys[:count])

    def found(self, keys: Sequence[bytes]) -> Match:
        """Those of a request's first blocks that are here."""
        stretches = self._tree.find(keys)
        count = sum([stretch.blocks for stretch in stretches])
        return Match(keys[:count], stretches, self._tree.each)

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many of a request's first blocks are here."""
        return len(self.found(keys))

    def ending(self, request: Request, count: int) -> Block | None:
        """The block behind the first `count` ones that the request's certain tokens end with.

        All of it but the drafter's last row is what the request would have computed.
        """
        known = request.known
        last = request.reusable < known - 1 or (count + 1) * self.block_size != known
        if last or not self._splits:
            return None
        before = self.keys(request)[count - 1] if count else None
        key = self._tree.ending_with(self.names.ending(request, count), before)
        return None if key is None else self.block(key)

    def block(self, key: bytes) -> Block | None:
        run = self._tree.run(key)
        return None if run is None else self._block(key, run, self._tree.place(key))

    def blocks(self) -> Iterator[Block]:
        """All blocks, in the order in which they came."""
        for key, run, at in self._tree:
            yield self._block(key, run, at)

    def latest(self, key: bytes) -> Pages | None:
        """As in the Block of this key, which is here."""
        return tuple([() for _ in self._pools]) if self._splits else self._latest.get(key)

    def lineage(self, key: bytes) -> Iterator[bytes]:
        """The keys of the blocks before one that is here, the nearest first. Who asks for few of
        them pays for few."""
        run = self._tree.run(key)
        at = 0 if run is None else self._tree.place(key)
        while run is not None:
            for place in range(at - 1, -1, -1):
                yield run.keys[place]
            run = run.parent
            at = 0 if run is None else len(run.keys)

    def common(self, one: Request, other: Request) -> int:
        """Tokens of the blocks that both requests begin with."""
        first, second = self.keys(one), self.keys(other)
        low, high = 0, min(len(first), len(second))
        while low < high:  # equal keys have equal ones before them
            middle = (low + high + 1) // 2
            same = first[middle - 1] == second[middle - 1]
            low, high = (middle, high) if same else (low, middle - 1)
        return low * self.block_size

    def touch(self, match: Match) -> None:
        """These blocks are in use now."""
        if not match.keys:
            return
        self._touch_leaf(match.stretches[-1].run, match.keys[-1])
        for key in match.keys if not self._splits else ():
            if key in self._latest:
                self._latest.move_to_end(key)

    def touch_ending(self, block: Block) -> None:
        """This block, which `ending` found, is in use now."""
        run = self._tree.run(block.key)
        assert run is not None, "it was just found"
        self._touch_leaf(run, block.key)

    def publish(self, request: Request, tenancy: Tenancy) -> None:
        """Keep the blocks that the row has computed and that are not kept yet."""
        count, at = tenancy.whole // self.block_size, tenancy.published
        if count <= at:
            return
        keys, tree = self.keys(request), self._tree
        while at and keys[at - 1] not in tree:
            at -= 1
        new = at
        while new < count and keys[new] in tree:
            new += 1
        if new < count:
            each = zip(tenancy.spans, tree.each, strict=True)
            pages = tuple([span.pages[new * n : count * n] if n else [] for span, n in each])
            self._add(new, keys[:count], self.names.endings(request), pages)
        if not self._splits or self.watcher is not None:
            for index in range(at, count):
                fresh = index >= new
                if not self._splits and keys[index] not in self._latest:
                    fresh |= self._keep_latest(keys[index], tenancy, index)
                if fresh and self.watcher is not None:
                    self.watcher.kept(keys[index])
        tenancy.published = count

    def make_room(self, group: int, count: int) -> None:
        """Drop blocks until `count` pages of the group are free, or will be once letters came and
        copies have ended."""
        pool = self._pools[group]
        if self._groups[group].retention is None:
            while pool.cached and (lack := count - pool.free - pool.due - pool.returning) > 0:
                self._drop_oldest(group, lack)
            return
        if pool.free + pool.due + pool.returning >= count:
            return
        for key, latest in tuple(self._latest.items()):
            if pool.some_idle(latest[group]):
                if self.watcher is not None:
                    self.watcher.leaving(key)
                self._drop_latest(key)
                if pool.free + pool.due + pool.returning >= count:
                    return

    def clear(self) -> None:
        """Forget everything."""
        for run in self._tree.roots():
            self._drop(run, 0, worth=False)
        if self.watcher is not None:
            self.watcher.clear()

    def forget(self, request: Request, tenancy: Tenancy) -> None:
        """Drop the blocks that the tenancy may have written, and all that follow them.

        Those that it found may be to blame as well: at a second failure behind them, with no
        success between, they are dropped too. One failure may be the request's own.
        """
        found, gone = self._found(request, tenancy), list[bytes]()
        sound = next((n for n, key in enumerate(found) if key in self._doubted), len(found))
        keys = self.keys(request)[sound:]
        if tenancy.tail in self._tree and tenancy.tail in self._doubted:
            keys = [tenancy.tail, *keys]
        elif tenancy.tail in self._tree:
            self._doubted.add(tenancy.tail)
        self._doubted.update(found)
        for key in keys:
            gone += self._drop_block(key)
        if self.watcher is not None:
            self.watcher.forget(keys, gone)

    def condemn(self, group: int, pages: Sequence[int]) -> None:
        """Drop the blocks that hold these pages, and all that follow them."""
        bad = set(pages)
        for key, own, latest in list(self.blocks()):
            held = (*own[group], *(latest[group] if latest is not None else ()))
            if bad.isdisjoint(held) or key not in self._tree:
                continue
            gone = self._drop_block(key)
            if self.watcher is not None:
                self.watcher.forget([key], gone)

    def adopt(self, request: Request, index: int, pages: Pages) -> bytes:
        """The request's block `index`, whose pages were copied here unless it came otherwise; its
        key. The block before it is here."""
        keys = self.keys(request)
        key = keys[index]
        if key not in self._tree:
            self._add(index, keys[: index + 1], self.names.endings(request), pages)
            if not self._splits and not any(group.resume_tokens for group in self._groups):
                self.adopt_latest(key, tuple(() for _ in pages))
        return key

    def adopt_latest(self, key: bytes, latest: Pages) -> None:
        """Keep copied pages that a row needs which starts at the block's end."""
        for pool, pages in zip(self._pools, latest, strict=True):
            if pages:
                pool.keep(pages)
        self._latest[key] = latest

    def trust(self, request: Request, tenancy: Tenancy) -> None:
        """The tenancy has ended well behind the blocks that it found."""
        if self._doubted:
            self._doubted.difference_update((*self._found(request, tenancy), tenancy.tail))

    def _found(self, request: Request, tenancy: Tenancy) -> list[bytes]:
        """Of the blocks behind which the tenancy began, those that are still kept."""
        keys = self.keys(request)[: tenancy.start // self.block_size]
        return keys[: self.depth(keys)]

    def share_keys(self, other: PrefixCache) -> None:
        """Know blocks as another cache does, before any is kept."""
        self.names = other.names

    def keys(self, request: Request) -> list[bytes]:
        """Of every block behind which the request has a certain token."""
        return self.names.keys(request)

    def _block(self, key: bytes, run: Run, at: int) -> Block:
        pages = tuple([tuple(own) for own in self._tree.pages(run, at, at + 1)])
        return Block(key, pages, self.latest(key))

    def _add(
        self, at: int, keys: list[bytes], endings: list[bytes], pages: tuple[Sequence[int], ...]
    ) -> None:
        for pool, own in zip(self._pools, pages, strict=True):
            if own:
                pool.keep(own)
        self._tree.add(at, keys, endings, pages)

    def _touch_leaf(self, run: Run, key: bytes) -> None:
        if run in self._tree.leaves and run.keys[-1] == key:
            self._tree.leaves.move_to_end(run)

    def _keep_latest(self, key: bytes, tenancy: Tenancy, index: int) -> bool:
        """Whether the pages for a start at the block's end are still the row's, to be kept."""
        end = (index + 1) * self.block_size
        latest: list[tuple[int, ...]] = []
        for group, span in zip(self._groups, tenancy.spans, strict=True):
            columns = range(0) if group.retention is None else group.resume_columns(end)
            if columns and columns.start < span.first:
                return False  # freed before the block could be kept
            latest.append(tuple(span.pages[columns.start - span.first : columns.stop - span.first]))
        self.adopt_latest(key, tuple(latest))
        return True

    def _drop_oldest(self, group: int, lack: int) -> None:
        """Drop the last blocks of a leaf that free pages of the group, of which `lack` are to be
        freed; failing that, any such block and its heirs."""
        pool, each, leaves = self._pools[group], self._tree.each[group], self._tree.leaves
        # a copy of what leaves may start at each, and then it does not free its pages yet
        most = 1 if self.watcher is not None else -(-lack // each)
        for run in leaves:
            own = run.pages[group]
            count = pool.idle_at_end(own, each, most)
            if count:
                break
        else:
            run, at = self._first_idle(group)
            count = len(run.keys) - at
        at = len(run.keys) - count
        parent = run if at else run.parent
        self._drop(run, at)
        if parent is not None and parent in leaves:
            leaves.move_to_end(parent, last=False)

    def _first_idle(self, group: int) -> tuple[Run, int]:
        """A block, and its place in its run, that would free pages of the group."""
        for _, run, at in self._tree:
            if self._pools[group].some_idle(self._tree.pages(run, at, at + 1)[group]):
                return run, at
        raise AssertionError("a page is cached by some block")

    def _drop_block(self, key: bytes) -> list[bytes]:
        run = self._tree.run(key)
        return [] if run is None else self._drop(run, self._tree.place(key), worth=False)

    def _drop(self, run: Run, at: int, worth: bool = True) -> list[bytes]:
        """Drop a run's blocks from `at` on and everything behind them; their keys. `worth`: what
        they hold is as it should be."""
        if worth and self.watcher is not None:
            for key in self._tree.behind(run, at):
                self.watcher.leaving(key)
        gone = self._tree.cut(run, at)
        for one in gone:
            self._let_go(one)
        return list(chain.from_iterable([one.keys for one in gone]))

    def _let_go(self, gone: Gone) -> None:
        for pool, pages in zip(self._pools, gone.pages, strict=True):
            if pages:
                pool.drop(pages)
        for key in gone.keys if self._latest else ():
            if key in self._latest:
                self._drop_latest(key)
        if self._doubted:
            self._doubted.difference_update(gone.keys)

    def _drop_latest(self, key: bytes) -> None:
        latest = self._latest.pop(key)
        for pool, pages in zip(self._pools, latest, strict=True):
            if pages:
                pool.drop(pages)
