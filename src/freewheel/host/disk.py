# SPDX-License-Identifier: Apache-2.0
"""Blocks in files, below host memory: written behind it, read into it before they are fetched.

What host memory has is written soon after, from its slot, by a thread of its own. A request that
begins with blocks which only files hold waits in the queue while they are read back into slots;
then it fetches them as any others. No round waits for a file, and no request for one to be written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from freewheel.host.prefix import PrefixCache
from freewheel.host.request import Request
from freewheel.host.tier import HostTier, Kept
from freewheel.spec import BlockCopy, Transfer, TransferResult, Way
from freewheel.spec.filed import NO_KEY, Filed


class DiskIndex:
    """Which blocks files hold: at most `blocks`; the least recently used goes first.

    `secret` keys the hash by which blocks are known: who has it finds them again after a restart.
    `found`: what lies there at the start, the least recently used first.
    """

    def __init__(self, blocks: int, secret: bytes, found: Iterable[Filed] = ()) -> None:
        self.blocks, self.secret = blocks, secret
        self._filed: OrderedDict[bytes, Filed] = OrderedDict()
        self._heirs: dict[bytes, set[bytes]] = {}
        self.excess = [key for one in found for key in self.add(one)]

    def __len__(self) -> int:
        return len(self._filed)

    def find(self, key: bytes) -> Filed | None:
        return self._filed.get(key)

    def touch(self, key: bytes) -> None:
        """It is in use now."""
        self._filed.move_to_end(key)

    def add(self, one: Filed) -> list[bytes]:
        """A file holds the block; keys of those whose files are to go for it."""
        self._filed[one.key] = one
        self._filed.move_to_end(one.key)
        self._heirs.setdefault(one.parent, set()).add(one.key)
        return [self._drop(next(iter(self._filed))) for _ in range(len(self) - self.blocks)]

    def discard(self, key: bytes) -> list[bytes]:
        """Nobody is to find this block again; its key, if it was here."""
        return [self._drop(key)] if key in self._filed else []

    def forget(self, key: bytes) -> list[bytes]:
        """Nobody is to find this block again, nor any behind it; keys of those that were here."""
        gone: list[bytes] = []
        keys = [key]
        while keys:
            one = keys.pop()
            keys.extend(self._heirs.get(one, ()))
            if one in self._filed:
                gone.append(self._drop(one))
        return gone

    def clear(self) -> list[bytes]:
        """Forget everything; the keys of all."""
        return [self._drop(key) for key in list(self._filed)]

    def _drop(self, key: bytes) -> bytes:
        one = self._filed.pop(key)
        heirs = self._heirs[one.parent]
        heirs.discard(key)
        if not heirs:
            del self._heirs[one.parent]
        return key


@dataclass
class DiskCounts:
    """Blocks since the engine began. `failed`: could not be written."""

    stored: int = 0
    fetched: int = 0
    damaged: int = 0
    failed: int = 0
    evicted: int = 0


@dataclass(eq=False)
class _Write:
    kept: Kept
    filed: Filed
    void: bool = False


class DiskMoves:
    """Decides what goes to files and what comes back, and keeps account of what is on its way."""

    def __init__(self, index: DiskIndex, tier: HostTier, ids: Iterator[int]) -> None:
        self.index, self._tier, self._ids = index, tier, ids
        self.counts = DiskCounts()
        self._fresh: OrderedDict[Kept, None] = OrderedDict()
        self._writes: dict[int, _Write] = {}
        self._reads: dict[int, Kept] = {}
        self._due: list[Transfer] = []
        self._gone: list[bytes] = list(index.excess)

    @property
    def moving(self) -> int:
        """Transfers that some request waits for."""
        return len(self._reads)

    def kept(self, kept: Kept) -> None:
        """Host memory holds a block that it did not hold before, or more of it."""
        self._fresh[kept] = None

    def due(self) -> list[Transfer]:
        """Transfers that are to start now."""
        most = max(1, self._tier.slots // 2)  # slots of blocks under way are not given away
        while self._fresh and len(self._writes) < most:
            kept, _ = self._fresh.popitem(last=False)
            filed = self.index.find(kept.key)
            if not kept.gone and (filed is None or (kept.latest and not filed.latest)):
                self._write(kept)
        if self._gone:
            gone, self._gone = tuple(self._gone), []
            self._due.append(Transfer(next(self._ids), Way.DOWN, (), gone=gone))
        due, self._due = self._due, []
        return due

    def lift(self, request: Request, prefix: PrefixCache, have: int) -> bool:
        """Whether the request is to wait for files, which are sent for just now.

        `have`: blocks that it could start behind without. It is sent for once.
        """
        if request.lifted:
            return False
        best, missing = self._run(request, prefix)
        missing = missing[: self._tier.slots // 2]
        if best <= have or not missing:
            return False
        request.lifted = True
        keys = prefix.keys(request)[: request.reusable // prefix.block_size]
        lineage = dict(zip(keys[1:], keys, strict=False))
        return [self._read(filed, lineage) for filed in missing].count(True) > 0

    def reach(self, request: Request, prefix: PrefixCache) -> int:
        """Blocks behind which the request could start with files as well."""
        return self._run(request, prefix)[0]

    def _run(self, request: Request, prefix: PrefixCache) -> tuple[int, list[Filed]]:
        """The same, and those of them that only files hold."""
        keys = prefix.keys(request)[: request.reusable // prefix.block_size]
        best, wanted, missing = 0, 0, list[Filed]()
        for at, key in enumerate(keys):
            block, kept, filed = prefix.block(key), self._tier.find(key), self.index.find(key)
            if block is None and kept is None:
                if filed is None:
                    break
                missing.append(filed)
                resumes = filed.latest
            else:
                resumes = kept.latest if kept is not None else False
                resumes = resumes or (block is not None and block.latest is not None)
            if resumes:
                best, wanted = at + 1, len(missing)
        return best, missing[:wanted]

    def ended(self, result: TransferResult) -> bool:
        """Whether this was one of them: a transfer has ended."""
        if result.id in self._writes:
            self._written(self._writes.pop(result.id), bool(result.damaged))
        elif result.id in self._reads:
            self._landed(self._reads.pop(result.id), bool(result.damaged))
        else:
            return False
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        """What these blocks hold, and whatever lies behind them, is not to be found again."""
        for key in keys:
            self._gone += self.index.forget(key)
        self._void()

    def clear(self) -> None:
        """Forget everything."""
        self._fresh.clear()
        self._gone += self.index.clear()
        self._void()

    def _void(self) -> None:
        for write in self._writes.values():
            write.void = True

    def _write(self, kept: Kept) -> None:
        parent = self._tier.parent(kept.key) or NO_KEY
        filed = Filed(kept.key, parent, kept.latest)
        kept.readers += 1
        transfer = Transfer(next(self._ids), Way.DOWN, (BlockCopy(kept.slot, 0, (), filed),))
        self._writes[transfer.id] = _Write(kept, filed)
        self._due.append(transfer)

    def _written(self, write: _Write, failed: bool) -> None:
        write.kept.readers -= 1
        self._tier.settled(write.kept)
        if failed:
            self.counts.failed += 1
        elif write.void:
            self._gone.append(write.filed.key)
        else:
            self.counts.stored += 1
            evicted = self.index.add(write.filed)
            self.counts.evicted += len(evicted)
            self._gone += evicted

    def _read(self, filed: Filed, lineage: dict[bytes, bytes]) -> bool:
        kept = self._tier.take(filed.key, _before(filed.key, lineage), filed.latest)
        if kept is None:
            return False
        self.index.touch(filed.key)
        transfer = Transfer(next(self._ids), Way.UP, (BlockCopy(kept.slot, 0, (), filed),))
        self._reads[transfer.id] = kept
        self._due.append(transfer)
        return True

    def _landed(self, kept: Kept, damaged: bool) -> None:
        kept.ready = True
        self._tier.settled(kept)
        if not damaged:
            kept.filed = True
            self.counts.fetched += 1
            return
        self.counts.damaged += 1
        self._tier.discard(kept)
        self._gone += self.index.discard(kept.key)


def _before(key: bytes, lineage: dict[bytes, bytes]) -> Iterator[bytes]:
    """Keys of the blocks before one, the nearest first."""
    while key in lineage:
        key = lineage[key]
        yield key
