# SPDX-License-Identifier: Apache-2.0
"""Pages of earlier requests, found again by the tokens that they stand for.

A block is the stretch of tokens after which pages of all groups end. What a block's pages hold
follows from the tokens up to its end and the one behind it, which the drafter's last row has read.
So a block is known by all of these tokens: its key is a keyed hash of the key before it and of its
own tokens, shifted by one. Whoever starts behind a block found by its key has what it would have
computed itself, drafter's rows included.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Protocol

from freewheel.host.pages import PageAllocator
from freewheel.host.request import Request
from freewheel.host.tenancy import PageSpan, Tenancy

DIGEST_BYTES = 16
DIGEST_HEAD = DIGEST_BYTES.to_bytes(4, "little")


@dataclass(eq=False)
class Block:
    """Kept pages of one block.

    `pages[g]`: of a group that keeps everything, the block's own pages. `latest[g]`: of a group
    that keeps the latest tokens, the pages that a row needs which starts at the block's end; None
    if they are not kept, and then the block only leads to others. Both are empty where the group
    is of the other sort. `doubted`: the last one to end that had found it here went wrong.
    `ending`: by what requests know it that end with it, not knowing the token behind it.
    """

    key: bytes
    parent: Block | None
    pages: tuple[tuple[int, ...], ...]
    latest: tuple[tuple[int, ...], ...] | None = None
    children: set[Block] = field(default_factory=set["Block"])
    doubted: bool = False
    ending: bytes = b""


class Watcher(Protocol):
    """Who is told what comes and goes."""

    def kept(self, block: Block) -> None:
        """The block is new, or more of it is kept than before."""
        ...

    def leaving(self, block: Block) -> None:
        """Pages of the block are about to be dropped, because they are wanted elsewhere."""
        ...

    def forget(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        """What these blocks hold, and whatever lies behind them, is not to be found again."""
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
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self.block_size = math.lcm(*(group.page_size for group in self._groups))
        self.watcher: Watcher | None = None
        self._blocks: dict[bytes, Block] = {}
        self._leaves: OrderedDict[Block, None] = OrderedDict()
        self._resumable: OrderedDict[Block, None] = OrderedDict()
        # Where some groups keep the latest tokens alone, nobody can start a token before the end.
        self._endings: dict[bytes, dict[Block, None]] = {}
        self._splits = all(group.retention is None for group in self._groups)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, request: Request, most: int) -> tuple[Block, ...]:
        """The longest run of blocks, from the request's first token on, behind which it can start.

        Of its first `most` tokens. At least one certain token is left to compute: a block is known
        by the token behind it.
        """
        keys = self.keys(request)[: most // self.block_size]
        found: list[Block] = []
        for block in map(self._blocks.get, keys):
            if block is None:
                break
            found.append(block)
        while found and found[-1].latest is None:
            found.pop()
        return tuple(found)

    def ending(self, request: Request, count: int) -> Block | None:
        """The block behind the first `count` ones that the request's certain tokens end with.

        All of it but the drafter's last row is what the request would have computed.
        """
        known = request.known
        last = request.reusable < known - 1 or (count + 1) * self.block_size != known
        if last or not self._splits:
            return None
        found = self._endings.get(self.ending_key(request, count))
        return next(reversed(found)) if found else None

    def ending_key(self, request: Request, index: int) -> bytes:
        """Of the request's block `index`, up to its last token; empty where nobody asks for it."""
        if not self._splits:
            return b""
        before = request.block_keys[index - 1] if index else request.cache_salt.encode()
        first = index * self.block_size
        tokens = request.tokens(first + 1 if index else 0, first + self.block_size)
        data = len(before).to_bytes(4, "little") + before + _bytes_of(tokens)
        return blake2b(data, key=self._secret, digest_size=DIGEST_BYTES, person=b"ending").digest()

    def block(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def common(self, one: Request, other: Request) -> int:
        """Tokens of the blocks that both requests begin with."""
        first, second = self.keys(one), self.keys(other)
        low, high = 0, min(len(first), len(second))
        while low < high:  # equal keys have equal ones before them
            middle = (low + high + 1) // 2
            same = first[middle - 1] == second[middle - 1]
            low, high = (middle, high) if same else (low, middle - 1)
        return low * self.block_size

    def touch(self, blocks: Sequence[Block]) -> None:
        """These blocks are in use now."""
        if not blocks:
            return
        if blocks[-1] in self._leaves:
            self._leaves.move_to_end(blocks[-1])
        for block in blocks:
            if block in self._resumable:
                self._resumable.move_to_end(block)

    def publish(self, request: Request, tenancy: Tenancy) -> None:
        """Keep the blocks that the row has computed and that are not kept yet."""
        count, at = tenancy.whole // self.block_size, tenancy.published
        if count <= at:
            return
        keys = self.keys(request)
        while at and keys[at - 1] not in self._blocks:
            at -= 1
        parent = self._blocks[keys[at - 1]] if at else None
        for index in range(at, count):
            block = self._blocks.get(keys[index])
            new = block is None
            if block is None:
                block = self._add(keys[index], parent, tenancy, index)
                self._end_with(block, self.ending_key(request, index))
            parent = block
            if block.latest is None:
                new |= self._keep_latest(block, tenancy, index)
            if new and self.watcher is not None:
                self.watcher.kept(block)
        tenancy.published = count

    def make_room(self, group: int, count: int) -> None:
        """Drop blocks until `count` pages of the group are free, or will be once letters came and
        copies have ended."""
        pool = self._pools[group]
        if self._groups[group].retention is None:
            while pool.cached and pool.free + pool.due + pool.returning < count:
                self._drop_oldest(group)
            return
        for block in tuple(self._resumable):
            if pool.free + pool.due + pool.returning >= count:
                return
            if block.latest is not None and self._frees(group, block.latest[group]):
                if self.watcher is not None:
                    self.watcher.leaving(block)
                self._drop_latest(block)

    def clear(self) -> None:
        """Forget everything."""
        for block in [b for b in self._blocks.values() if b.parent is None]:
            self._drop(block, worth=False)
        if self.watcher is not None:
            self.watcher.clear()

    def forget(self, request: Request, tenancy: Tenancy) -> None:
        """Drop the blocks that the tenancy may have written, and all that follow them.

        Those that it found may be to blame as well: at a second failure behind them, with no
        success between, they are dropped too. One failure may be the request's own.
        """
        found = self._found(request, tenancy)
        sound = next((n for n, block in enumerate(found) if block.doubted), len(found))
        for block in found:
            block.doubted = True
        keys, gone = self.keys(request)[sound:], list[Block]()
        tail = self._blocks.get(tenancy.tail)
        if tail is not None and tail.doubted:
            keys = [tail.key, *keys]
        elif tail is not None:
            tail.doubted = True
        for key in keys:
            if key in self._blocks:
                gone += self._drop(self._blocks[key], worth=False)
        if self.watcher is not None:
            self.watcher.forget(keys, gone)

    def condemn(self, group: int, pages: Sequence[int]) -> None:
        """Drop the blocks that hold these pages, and all that follow them."""
        bad = set(pages)
        for block in list(self._blocks.values()):
            held = (*block.pages[group], *(block.latest[group] if block.latest is not None else ()))
            if bad.isdisjoint(held) or self._blocks.get(block.key) is not block:
                continue
            gone = self._drop(block, worth=False)
            if self.watcher is not None:
                self.watcher.forget([block.key], gone)

    def adopt(
        self, request: Request, index: int, parent: Block | None, pages: tuple[tuple[int, ...], ...]
    ) -> Block:
        """The request's block `index`, whose pages were copied here unless it came otherwise."""
        key = request.block_keys[index]
        block = self._blocks.get(key)
        if block is None:
            block = self._insert(key, parent, pages)
            self._end_with(block, self.ending_key(request, index))
            if not any(group.resume_tokens for group in self._groups):
                self.adopt_latest(block, tuple(() for _ in pages))
        return block

    def adopt_latest(self, block: Block, latest: tuple[tuple[int, ...], ...]) -> None:
        """Keep copied pages that a row needs which starts at the block's end."""
        for pool, pages in zip(self._pools, latest, strict=True):
            if pages:
                pool.keep(pages)
        block.latest = latest
        self._resumable[block] = None

    def trust(self, request: Request, tenancy: Tenancy) -> None:
        """The tenancy has ended well behind the blocks that it found."""
        tail = self._blocks.get(tenancy.tail)
        for block in (*self._found(request, tenancy), *(() if tail is None else (tail,))):
            block.doubted = False

    def _found(self, request: Request, tenancy: Tenancy) -> list[Block]:
        """Of the blocks behind which the tenancy began, those that are still kept."""
        keys = self.keys(request)[: tenancy.start // self.block_size]
        return [self._blocks[key] for key in keys if key in self._blocks]

    def share_keys(self, other: PrefixCache) -> None:
        """Know blocks as another cache does, before any is kept."""
        self._secret = other._secret

    def keys(self, request: Request) -> list[bytes]:
        """Of every block behind which the request has a certain token."""
        size, keys = self.block_size, request.block_keys
        begun, count = len(keys), (request.known - 1) // size
        if count <= begun:
            return keys
        first = begun * size + 1 if begun else 0
        tokens = _bytes_of(request.tokens(first, count * size + 1))
        before = keys[-1] if keys else request.cache_salt.encode()
        head, secret, at = len(before).to_bytes(4, "little"), self._secret, 0
        for end in range(8 * ((begun + 1) * size + 1 - first), len(tokens) + 1, 8 * size):
            data = head + before + tokens[at:end]
            before = blake2b(data, key=secret, digest_size=DIGEST_BYTES).digest()
            keys.append(before)
            head, at = DIGEST_HEAD, end
        return keys

    def _add(self, key: bytes, parent: Block | None, tenancy: Tenancy, index: int) -> Block:
        pages = tuple(
            () if group.retention is not None else _own(span, self._columns(group.page_size, index))
            for group, span in zip(self._groups, tenancy.spans, strict=True)
        )
        return self._insert(key, parent, pages)

    def _insert(
        self, key: bytes, parent: Block | None, pages: tuple[tuple[int, ...], ...]
    ) -> Block:
        for pool, own in zip(self._pools, pages, strict=True):
            if own:
                pool.keep(own)
        block = self._blocks[key] = Block(key, parent, pages)
        if parent is not None:
            parent.children.add(block)
            self._leaves.pop(parent, None)
        self._leaves[block] = None
        return block

    def _end_with(self, block: Block, ending: bytes) -> None:
        block.ending = ending
        if ending:
            self._endings.setdefault(ending, {})[block] = None

    def _columns(self, page_size: int, index: int) -> range:
        each = self.block_size // page_size
        return range(index * each, (index + 1) * each)

    def _keep_latest(self, block: Block, tenancy: Tenancy, index: int) -> bool:
        """Whether the pages for a start at the block's end are still the row's, to be kept."""
        end = (index + 1) * self.block_size
        latest: list[tuple[int, ...]] = []
        for group, span in zip(self._groups, tenancy.spans, strict=True):
            columns = range(0) if group.retention is None else group.resume_columns(end)
            if columns and columns.start < span.first:
                return False  # freed before the block could be kept
            latest.append(_own(span, columns))
        self.adopt_latest(block, tuple(latest))
        return True

    def _drop_oldest(self, group: int) -> None:
        """Drop a leaf that frees pages of the group; failing that, any such block and its heirs."""
        blocks = chain(self._leaves, self._blocks.values())
        block = next(b for b in blocks if self._frees(group, b.pages[group]))
        parent = block.parent
        self._drop(block)
        if parent is not None and parent in self._leaves:
            self._leaves.move_to_end(parent, last=False)

    def _frees(self, group: int, pages: tuple[int, ...]) -> bool:
        return self._pools[group].some_idle(pages)

    def _drop(self, block: Block, worth: bool = True) -> list[Block]:
        """Drop a block and everything behind it; these. `worth`: what they hold is as it should."""
        if block.parent is not None:
            block.parent.children.discard(block)
            if not block.parent.children:
                self._leaves[block.parent] = None
        heirs, gone = [block], list[Block]()
        while heirs:
            heir = heirs.pop()
            gone.append(heir)
            if worth and self.watcher is not None:
                self.watcher.leaving(heir)
            heirs.extend(heir.children)
            heir.children.clear()
            self._drop_latest(heir)
            for pool, pages in zip(self._pools, heir.pages, strict=True):
                if pages:
                    pool.drop(pages)
            del self._blocks[heir.key]
            if heir.ending:
                alike = self._endings[heir.ending]
                del alike[heir]
                if not alike:
                    del self._endings[heir.ending]
            self._leaves.pop(heir, None)
        return gone

    def _drop_latest(self, block: Block) -> None:
        if block.latest is None:
            return
        for pool, pages in zip(self._pools, block.latest, strict=True):
            if pages:
                pool.drop(pages)
        block.latest = None
        del self._resumable[block]


def _bytes_of(tokens: Sequence[int]) -> bytes:
    """Eight of each."""
    return struct.pack(f"{len(tokens)}q", *tokens)


def _own(span: PageSpan, columns: range) -> tuple[int, ...]:
    return tuple(span.pages[columns.start - span.first : columns.stop - span.first])
