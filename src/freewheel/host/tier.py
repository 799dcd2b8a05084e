# SPDX-License-Identifier: Apache-2.0
"""Which blocks the host's memory holds, and in which of its slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(eq=False)
class Kept:
    """A block in a slot of host memory.

    `latest`: it has the pages too that a row needs which starts at its end. `ready`: its pages are
    there. `readers`: copies from it under way. `gone`: nobody finds it any more. `filed`: its pages
    came from a file, and no request has fetched them since.
    """

    key: bytes
    slot: int
    latest: bool
    ready: bool = False
    readers: int = 0
    gone: bool = False
    filed: bool = False

    @property
    def busy(self) -> bool:
        return not self.ready or self.readers > 0


class HostTier:
    """`slots` places, each for one block; the least recently used block goes first.

    A block may be here without the one before it. A slot is free again once no copy uses it.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._leaving: set[Kept] = set()
        # Also of blocks that are not here, if something behind them is.
        self._heirs: dict[bytes, set[bytes]] = {}
        self._parents: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def free(self) -> int:
        """Slots that hold nothing and that no copy uses."""
        return len(self._free)

    def find(self, key: bytes) -> Kept | None:
        return self._kept.get(key)

    def parent(self, key: bytes) -> bytes | None:
        """The block before one that is here; None if there is none before it."""
        return self._parents.get(key)

    def touch(self, kept: Kept) -> None:
        """It is in use now."""
        if kept.key in self._kept:
            self._kept.move_to_end(kept.key)

    def take(self, key: bytes, lineage: Iterable[bytes], latest: bool) -> Kept | None:
        """A slot for a block that is to be copied here; None if copies use all of them.

        `lineage`: the blocks before it, the nearest first.
        """
        heir = key
        for parent in lineage:
            if heir in self._parents:
                break
            self._parents[heir] = parent
            self._heirs.setdefault(parent, set()).add(heir)
            heir = parent
        if not self._free:
            oldest = next((kept for kept in self._kept.values() if not kept.busy), None)
            if oldest is None:
                self._prune(key)
                return None
            self.discard(oldest)
        kept = self._kept[key] = Kept(key, self._free.pop(), latest)
        return kept

    def settled(self, kept: Kept) -> None:
        """A copy to or from its slot has ended."""
        if kept.gone and not kept.busy:
            self._leaving.discard(kept)
            self._free.append(kept.slot)

    def discard(self, kept: Kept) -> None:
        """Nobody is to find it again."""
        if kept.gone:
            return
        kept.gone = True
        del self._kept[kept.key]
        self._prune(kept.key)
        self._leaving.add(kept)
        self.settled(kept)

    def forget(self, key: bytes) -> None:
        """Nobody is to find this block again, nor any behind it."""
        keys = [key]
        while keys:
            one = keys.pop()
            keys.extend(self._heirs.get(one, ()))
            if (kept := self._kept.get(one)) is not None:
                self.discard(kept)

    def clear(self) -> None:
        for kept in list(self._kept.values()):
            self.discard(kept)

    def _prune(self, key: bytes | None) -> None:
        """Remember nothing of blocks that are not here and lead to none that is."""
        while key is not None and key not in self._kept and key not in self._heirs:
            parent = self._parents.pop(key, None)
            if parent is not None:
                self._heirs[parent].discard(key)
                if not self._heirs[parent]:
                    del self._heirs[parent]
            key = parent

    def conserves(self) -> bool:
        """Every slot is free, or holds one block, or waits for its last copy; and only that."""
        held = [kept.slot for kept in (*self._kept.values(), *self._leaving)]
        return sorted([*self._free, *held]) == list(range(self.slots))
