# SPDX-License-Identifier: Apache-2.0
"""Blocks between the device and host memory: copied out behind the rounds, fetched before a row.

A block that is published is copied out soon after, and at once if it must leave the device before.
Nothing below a row's computed length is written again, so such a copy waits for no round, and no
round waits for it: its pages count as owned until it has ended. A request that begins with blocks
which only host memory holds waits in the queue while these are copied back; then it finds them as
it finds any others.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from freewheel.errors import FreewheelError
from freewheel.host.disk import DiskIndex, DiskMoves
from freewheel.host.pages import PageAllocator
from freewheel.host.prefix import Block, Pages, PrefixCache
from freewheel.host.request import Request
from freewheel.host.tier import HostTier, Kept
from freewheel.spec import BlockCopy, Transfer, TransferResult, Way

OUTWARD = 32
"""Blocks on their way out at one time; of those that have to leave the device, twice as many."""

FETCHES = 4
"""Requests whose pages are on their way in at one time."""


@dataclass
class TierCounts:
    """Blocks since the engine began. `lost`: left the device while too many were on their way."""

    stored: int = 0
    fetched: int = 0
    damaged: int = 0
    lost: int = 0
    evicted: int = 0


@dataclass(eq=False)
class _Store:
    kept: Kept
    pages: Pages


@dataclass(eq=False)
class _Load:
    """`links[i]`: the block that goes to `pages[i]`, behind `base`, the last one on the device.

    Where the last block lacks only what a row needs that starts behind it, it is the base.
    `lent`: all pages that wait for the end of this load.
    """

    request: Request
    base: Block | None
    links: list[Kept]
    pages: list[Pages]
    latest: Pages | None
    lent: Pages
    known: int
    void: bool = False


@dataclass(eq=False)
class _Run:
    """Blocks that a request begins with: those on the device, then those in host memory alone."""

    keys: list[bytes] = field(default_factory=list[bytes])
    kept: list[Kept] = field(default_factory=list[Kept])
    latest: Kept | None = None
    """Where the pages are that a row needs to start at the end; None: on the device."""

    def __len__(self) -> int:
        return len(self.keys) + len(self.kept)


class Moves:
    """Decides what is copied, and keeps account of what is on its way."""

    def __init__(
        self,
        pools: Sequence[PageAllocator],
        prefix: PrefixCache,
        tier: HostTier,
        disk: DiskIndex | None = None,
    ) -> None:
        self._pools = tuple(pools)
        self._prefix = prefix
        self.tier = tier
        self.counts = TierCounts()
        self.arriving = 0
        """Blocks on their way from another engine: requests may wait for them as for any others."""
        self._ids = itertools.count()
        self.disk = None if disk is None else DiskMoves(disk, tier, self._ids)
        self._fresh: OrderedDict[bytes, None] = OrderedDict()
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, _Load] = {}
        self._due: list[Transfer] = []

    @property
    def moving(self) -> int:
        """Transfers that have not been reported to have ended, but for those to files."""
        return len(self._stores) + len(self._loads) + (0 if self.disk is None else self.disk.moving)

    def kept(self, key: bytes) -> None:
        """The device holds a block that it did not hold before, or more of it."""
        self._fresh[key] = None

    def leaving(self, key: bytes) -> None:
        """The device is about to let pages of the block go."""
        if key not in self._fresh:
            return
        del self._fresh[key]
        block = self._wanted(key)
        if block is None:
            return
        if len(self._stores) < 2 * OUTWARD:
            self._store(block)
        else:
            self.counts.lost += 1

    def forget(self, keys: Sequence[bytes], gone: Sequence[bytes]) -> None:
        """What these blocks hold, and whatever lies behind them, is not to be found again."""
        for key in gone:
            self._fresh.pop(key, None)
        for key in keys:
            self.tier.forget(key)
        if self.disk is not None:
            self.disk.forget(keys)
        for load in self._loads.values():
            load.void = True

    def clear(self) -> None:
        """Forget everything."""
        self._fresh.clear()
        self.tier.clear()
        if self.disk is not None:
            self.disk.clear()
        for load in self._loads.values():
            load.void = True

    def due(self, fresh: bool = True) -> list[Transfer]:
        """Transfers that are to start now. `fresh`: also of blocks that nothing drives out yet."""
        while fresh and self._fresh and len(self._stores) < OUTWARD:
            key, _ = self._fresh.popitem(last=False)
            block = self._wanted(key)
            if block is not None:
                self._store(block)
        due, self._due = self._due, []
        return due if self.disk is None else due + self.disk.due()

    def fetch(self, request: Request, found: int) -> bool:
        """Whether the request is to wait for pages: for some on their way, or sent for just now.

        `found`: blocks on the device that it could start behind. It is sent for once; what is gone
        again when its turn comes is computed.
        """
        run = self._run(request)
        have = max(len(run), found)
        if self.disk is not None and self.disk.lift(request, self._prefix, have):
            return True
        if len(run) < found or (len(run) == found and run.latest is None):
            return False
        sources = [*run.kept, *([] if run.latest is None else [run.latest])]
        if any(not kept.ready for kept in sources) or self._incoming(sources):
            return True
        if request.fetched is not None:
            return False
        if len(self._loads) >= FETCHES:
            return True
        request.fetched = (0, 0)
        return self._load(request, run)

    def reach(self, request: Request) -> int:
        """Blocks behind which the request could start with what is here or on its way here."""
        return len(self._run(request))

    def known(self, request: Request) -> int:
        """The same, with what files hold."""
        reach = self.reach(request)
        return reach if self.disk is None else max(reach, self.disk.reach(request, self._prefix))

    def ended(self, result: TransferResult) -> None:
        """A transfer has ended. Raises KeyError for one that is not under way."""
        if result.id in self._stores:
            self._stored(self._stores.pop(result.id))
        elif self.disk is None or not self.disk.ended(result):
            self._landed(self._loads.pop(result.id), result.damaged)

    def check(self) -> None:
        """Raise FreewheelError unless every slot is accounted for once."""
        if not self.tier.conserves():
            raise FreewheelError("slots of host memory: some are lost, or held twice")

    def _wanted(self, key: bytes) -> Block | None:
        """The block, if host memory lacks it, or what a row needs to start behind it."""
        kept, block = self.tier.find(key), self._prefix.block(key)
        if kept is None or block is None or (not kept.latest and block.latest and not kept.busy):
            return block
        return None

    def _store(self, block: Block) -> None:
        before = self.tier.find(block.key)
        if before is not None:
            self.tier.discard(before)
        full = not self.tier.free
        kept = self.tier.take(block.key, self._prefix.lineage(block.key), block.latest is not None)
        if kept is None:
            self.counts.lost += 1
            return
        self.counts.evicted += full
        latest = block.latest or tuple(() for _ in self._pools)
        pages = tuple(a or b for a, b in zip(block.pages, latest, strict=True))
        for pool, own in zip(self._pools, pages, strict=True):
            pool.lend(own)
        transfer = Transfer(next(self._ids), Way.OUT, (_copy(kept, pages),))
        self._stores[transfer.id] = _Store(kept, pages)
        self._due.append(transfer)

    def _stored(self, store: _Store) -> None:
        self.counts.stored += 1
        store.kept.ready = True
        self.tier.settled(store.kept)
        if self.disk is not None:
            self.disk.kept(store.kept)
        self._take_back(store.pages)

    def _run(self, request: Request) -> _Run:
        """The longest run behind which a row can start with what device and host memory hold."""
        keys = self._prefix.keys(request)[: request.reusable // self._prefix.block_size]
        here, found = self._prefix.depth(keys), list[Kept]()
        for key in keys[here:]:
            kept = self.tier.find(key)
            if kept is None:
                break
            found.append(kept)
        while found and not found[-1].latest:
            found.pop()
        if found:
            return _Run(keys[:here], found, found[-1])
        for at in range(here, 0, -1):
            if self._prefix.latest(keys[at - 1]) is not None:
                return _Run(keys[:at])
            kept = self.tier.find(keys[at - 1])
            if kept is not None and kept.latest:
                return _Run(keys[:at], latest=kept)
        return _Run()

    def _incoming(self, sources: list[Kept]) -> bool:
        keys = {kept.key for kept in sources}
        return any(kept.key in keys for load in self._loads.values() for kept in load.links)

    def _load(self, request: Request, run: _Run) -> bool:
        """Send for the pages; False if there is no room for them now."""
        blocks = self._prefix.found(run.keys)
        self._prefix.touch(blocks)
        held = [blocks.pages(group) for group in range(len(self._pools))]
        for pool, pages in zip(self._pools, held, strict=True):
            pool.lend(pages)
        end = len(run) * self._prefix.block_size
        latest = [self._latest_count(pool, end, run.latest) for pool in self._pools]
        need = [
            self._own_count(pool) * len(run.kept) + count
            for pool, count in zip(self._pools, latest, strict=True)
        ]
        for group, count in enumerate(need):
            self._prefix.make_room(group, count)
        if any(count > pool.free for count, pool in zip(need, self._pools, strict=True)):
            self._take_back(held)
            return False
        borrowed = [pool.borrow(count) for pool, count in zip(self._pools, need, strict=True)]
        self._send(request, run, [list(pages) for pages in borrowed], latest, held)
        return True

    def _send(
        self,
        request: Request,
        run: _Run,
        free: list[list[int]],
        latest: list[int],
        held: list[list[int]],
    ) -> None:
        lent = tuple((*old, *new) for old, new in zip(held, free, strict=True))
        ends = tuple(tuple(_cut(pages, n)) for pages, n in zip(free, latest, strict=True))
        own = [
            tuple(tuple(_cut(free[g], self._own_count(p))) for g, p in enumerate(self._pools))
            for _ in run.kept
        ]
        links = run.kept or [run.latest for _ in range(1) if run.latest is not None]
        pages = own or [tuple(() for _ in self._pools)]
        targets = list(pages)
        targets[-1] = tuple(a or b for a, b in zip(pages[-1], ends, strict=True))
        for kept in links:
            kept.readers += 1
            self.tier.touch(kept)
        base = self._prefix.block(run.keys[-1]) if run.keys else None
        keeps = None if run.latest is None else ends
        load = _Load(request, base, links, own, keeps, lent, len(run.keys))
        copies = tuple(_copy(kept, to) for kept, to in zip(links, targets, strict=True))
        transfer = Transfer(next(self._ids), Way.IN, copies)
        self._loads[transfer.id] = load
        self._due.append(transfer)

    def _own_count(self, pool: PageAllocator) -> int:
        group = pool.group
        return 0 if group.retention is not None else self._prefix.block_size // group.page_size

    def _latest_count(self, pool: PageAllocator, end: int, source: Kept | None) -> int:
        group = pool.group
        return 0 if group.retention is None or source is None else len(group.resume_columns(end))

    def _landed(self, load: _Load, damaged: frozenset[int]) -> None:
        for index, kept in enumerate(load.links):
            kept.readers -= 1
            self.tier.settled(kept)
            if index in damaged:
                self.counts.damaged += 1
                self.tier.discard(kept)
        base = load.base
        here = None if base is None else self._prefix.block(base.key)
        whole = base is None or (here is not None and here.pages == base.pages)
        if whole and not load.void:
            self._adopt(load, damaged)
        self._take_back(load.lent)

    def _adopt(self, load: _Load, damaged: frozenset[int]) -> None:
        """The device holds these blocks from now on, up to the first that is damaged."""
        last, size = None if load.base is None else load.base.key, self._prefix.block_size
        good = next((i for i in range(len(load.links)) if i in damaged), len(load.links))
        for at, pages in enumerate(load.pages[:good], load.known):
            last = self._prefix.adopt(load.request, at, pages)
            self._fresh.pop(last, None)  # host memory has it
        self.counts.fetched += min(good, len(load.pages))
        lacks = last is not None and self._prefix.latest(last) is None
        if good == len(load.links) and last is not None and lacks and load.latest is not None:
            self._prefix.adopt_latest(last, load.latest)
        first = load.known * size
        load.request.fetched = (first, first + min(good, len(load.pages)) * size)
        brought = load.links[: min(good, len(load.pages))]
        load.request.filed = tuple(first + n * size for n, k in enumerate(brought) if k.filed)
        for kept in brought:
            kept.filed = False

    def _take_back(self, pages: Sequence[Sequence[int]]) -> None:
        for pool, own in zip(self._pools, pages, strict=True):
            pool.take_back(own)


def label_of(key: bytes) -> int:
    """What a block's checksum counts in for its key."""
    return int.from_bytes(key[:8], "little") >> 1


def _copy(kept: Kept, pages: Pages) -> BlockCopy:
    return BlockCopy(kept.slot, label_of(kept.key), pages)


def _cut(pages: list[int], count: int) -> list[int]:
    """Take the first `count` off."""
    first = pages[:count]
    del pages[:count]
    return first
