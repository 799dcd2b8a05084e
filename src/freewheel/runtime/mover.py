# SPDX-License-Identifier: Apache-2.0
"""Carries blocks between the device's pages and slots of host memory, a few at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freewheel.runtime.aside import Aside, Milestone, open_aside
from freewheel.runtime.files import FileStore
from freewheel.runtime.streams import Mark
from freewheel.spec.filed import Filed
from freewheel.spec.transfer import (
    PART_BYTES,
    SUM_BYTES,
    BlockCopy,
    SlotPlan,
    Transfer,
    TransferResult,
    Way,
)
from freewheel.state import CachePool, Canary

PIECE = 16
"""Blocks whose copies the host queues between two rounds: each costs it some tens of
microseconds."""

CHUNK = 1 << 28
"""Bytes of one allocation of host memory. Pinned memory comes in powers of two."""


@dataclass(frozen=True)
class _Part:
    """Where one field of one page lies in a slot: `size` bytes from `at` on."""

    stored: Tensor  # float or uint8 [layers, pages, page_rows, width]
    at: int
    size: int

    def within(self, slot: Tensor) -> Tensor:
        """dtype [layers, page_rows, width] of slot, uint8 [bytes]."""
        layers, _, rows, width = self.stored.shape
        words = slot[self.at : self.at + self.size].view(self.stored.dtype)
        return words.view(layers, rows, width)


@dataclass(frozen=True)
class _Trip:
    transfer: Transfer
    passed: Milestone


class Mover:
    """`slots` places of host memory, each for one block. A checksum travels with every block.

    With a canary, a page that is not what it says goes out with a wrong sum, so that nobody takes
    it for whole when it comes back.

    The checksum is a sum of its 64-bit words modulo 2**64, each times an odd number of its own:
    no change of a single word leaves it as it was.
    """

    def __init__(
        self,
        cache: CachePool,
        slots: int,
        device: str,
        canary: Canary | None = None,
        files: FileStore | None = None,
    ) -> None:
        self.slots = slots
        self.files = files
        self._canary = canary
        self._waiting: deque[tuple[Transfer, int]] = deque()
        self._trips: deque[_Trip] = deque()
        self.bytes_out = self.bytes_in = 0
        if not slots:
            return
        self._aside: Aside = open_aside(device)
        blocks = SlotPlan.of(cache.groups, math.lcm(*(g.page_size for g in cache.groups)))
        self._parts, self._words = _layout(cache, blocks)  # [group][place][field]
        self._size = 8 * self._words + SUM_BYTES
        self._each = max(1, CHUNK // self._size)
        self._memory = [
            self._aside.memory(min(self._each, slots - first) * self._size)
            for first in range(0, slots, self._each)
        ]
        self._flags = self._aside.memory(4 * slots).view(torch.int32)  # int32 [slots], on the host
        self._workspace = self._aside.workspace(self._size)
        index = torch.arange(self._words, dtype=torch.int64, device=device)
        self._weights = (index * 0x9E3779B97F4A7C15 % (1 << 62)) * 2 + 1  # int64 [words]

    def follow(self, mark: Mark) -> None:
        """Copies that are queued from here on come behind the mark."""
        if self.slots:
            with self._aside.queue():
                mark.follow()

    def start(self, transfer: Transfer) -> None:
        """It is under way; `go_on` does the work, or the thread of the files."""
        if transfer.way in (Way.DOWN, Way.UP):
            assert self.files is not None
            self.files.start(transfer, self._bytes_of)
            return
        self._waiting.extend((transfer, index) for index in range(len(transfer.blocks)))

    def go_on(self, most: int = PIECE) -> None:
        """Queue the copies of up to `most` blocks."""
        if not self._waiting:
            return
        with torch.inference_mode(), self._aside.queue():
            for _ in range(min(most, len(self._waiting))):
                transfer, index = self._waiting.popleft()
                self._carry(transfer.way, transfer.blocks[index])
                if index + 1 == len(transfer.blocks):
                    trip = _Trip(transfer, self._aside.milestone())
                    trip.passed.set()
                    self._trips.append(trip)

    def ended(self) -> list[TransferResult]:
        """Transfers whose copies are done, in the order in which they were started."""
        results: list[TransferResult] = []
        while self._trips and self._trips[0].passed.passed():
            results.append(self._result(self._trips.popleft().transfer))
        return results if self.files is None else results + self.files.ended()

    def wait(self) -> list[TransferResult]:
        """As `ended`, but at least one, if any is under way: the host waits for it."""
        while not self._trips and self._waiting:
            self.go_on()
        if self._trips:
            self._trips[0].passed.wait()
        elif self.files is not None:
            return self.files.ended(wait=True)
        return self.ended()

    def bytes_by(self, way: Way) -> int:
        """Carried so far."""
        out, into = (0, 0) if self.files is None else (self.files.bytes_out, self.files.bytes_in)
        return {Way.OUT: self.bytes_out, Way.IN: self.bytes_in, Way.DOWN: out, Way.UP: into}[way]

    def scan(self) -> list[list[Filed]]:
        """What files hold at the start, of each copy of the model: of this one."""
        assert self.files is not None, "there is a store"
        return [self.files.scan()]

    def slot(self, index: int) -> Tensor:
        """uint8 [bytes]: one slot of host memory. Raises IndexError if there is none."""
        chunk, place = divmod(index, self._each)
        return self._memory[chunk][place * self._size : (place + 1) * self._size]

    @property
    def slot_bytes(self) -> int:
        """Of a slot, its checksum included."""
        return self._size

    def view(self, slot: int) -> memoryview:
        """uint8 [slot_bytes]: the memory of a slot, for those who fill it from outside."""
        return np.asarray(self.slot(slot)).data

    def address(self, slot: int) -> int:
        """Where a slot begins, in this process."""
        return self.slot(slot).data_ptr()

    def stretches(self) -> list[tuple[int, int]]:
        """(address, bytes) of the memory in which slots lie."""
        return [(chunk.data_ptr(), chunk.numel()) for chunk in self._memory]

    def relabel(self, slot: int, before: int, after: int) -> None:
        """A block came into the slot from where it had another label."""
        self._sum_in(self.slot(slot)).add_(after - before)

    def _bytes_of(self, index: int) -> memoryview:
        return np.asarray(self.slot(index)).data

    def _carry(self, way: Way, copy: BlockCopy) -> None:
        slot = self.slot(copy.slot)
        block = slot if self._workspace is None else self._workspace  # uint8 [bytes]
        if way is Way.OUT:
            self._each_part(copy, lambda part, page: _gather(part, page, block))
            self._sum_in(block).copy_(self._sum(block, copy.label) + self._damage(copy))
            if block is not slot:
                slot.copy_(block, non_blocking=True)
            self.bytes_out += self._size
            return
        if block is not slot:
            block.copy_(slot, non_blocking=True)
        differs = self._sum_in(block) != self._sum(block, copy.label)  # bool [1]
        self._flags[copy.slot : copy.slot + 1].copy_(differs.int(), non_blocking=True)
        self._each_part(copy, lambda part, page: _spread(part, page, block))
        self._adopt(copy)
        self.bytes_in += self._size

    def _each_part(self, copy: BlockCopy, do: Callable[[_Part, int], None]) -> None:
        for places, pages in zip(self._parts, copy.pages, strict=True):
            for parts, page in zip(places, pages, strict=False):
                for part in parts:
                    do(part, page)

    def _damage(self, copy: BlockCopy) -> Tensor | int:
        """int64 [1]: not 0 if the canary's sums of the pages say otherwise than the pages."""
        if self._canary is None:
            return 0
        found: Tensor | int = 0
        for group, pages in enumerate(copy.pages):
            for page in pages:
                found = (self._canary.error_of(group, page) != 0).long()[0] + found
        return found

    def _adopt(self, copy: BlockCopy) -> None:
        if self._canary is not None:
            for group, pages in enumerate(copy.pages):
                for page in pages:
                    self._canary.adopt(group, page)

    def _sum_in(self, block: Tensor) -> Tensor:
        """int64 [1]: the checksum that a block, uint8 [bytes], brings."""
        return block[8 * self._words : 8 * self._words + 8].view(torch.int64)

    def _sum(self, block: Tensor, label: int) -> Tensor:
        """int64 [1]: the checksum that it should bring."""
        words = block[: 8 * self._words].view(torch.int64)
        return (words * self._weights).sum(0, keepdim=True) + label

    def _result(self, transfer: Transfer) -> TransferResult:
        if transfer.way is Way.OUT:
            return TransferResult(transfer.id)
        flags = [int(self._flags[copy.slot]) for copy in transfer.blocks]
        return TransferResult(transfer.id, frozenset(i for i, flag in enumerate(flags) if flag))


def _gather(part: _Part, page: int, block: Tensor) -> None:
    part.within(block).copy_(part.stored[:, page])


def _spread(part: _Part, page: int, block: Tensor) -> None:
    part.stored[:, page].copy_(part.within(block))


def _layout(cache: CachePool, plan: SlotPlan) -> tuple[list[list[list[_Part]]], int]:
    """Parts by group, place and field, and the 64-bit words that they take."""
    at = 0
    groups: list[list[list[_Part]]] = []
    for group, places in zip(plan.groups, plan.places, strict=True):
        groups.append([])
        for _ in range(places):
            parts: list[_Part] = []
            for stored in cache.stored(group.name):
                size = stored[:, 0].numel() * stored.element_size()
                parts.append(_Part(stored, at, size))
                at += -(-size // PART_BYTES) * PART_BYTES
            groups[-1].append(parts)
    return groups, at // 8
