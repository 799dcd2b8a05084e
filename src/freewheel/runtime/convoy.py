# SPDX-License-Identifier: Apache-2.0
"""Transfers of an engine of several ranks: each carries its own, and one has ended once all have.

    rank 0     says which transfers start, behind the round launched last (`Task.MOVE`)
    each rank  of the transfer's copy queues it beside its own rounds, behind those launched so far
    rank 0     asks now and then what has ended (`Task.SETTLE`); every rank says so at once
    rank 0     reads the answers when they are here; nobody waits for them, and no round does
    rank 0     counts a transfer as ended when all ranks of its copy have said so

Errands for prompts that change engines end in the same way, see `errands`.
So a page or a slot is given away when no rank reads or writes it any more, and what one rank found
damaged is damaged for all: only rank 0's scheduler draws conclusions, as from rounds.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from freewheel.errors import ConfigError
from freewheel.runtime.errands import Arrivals, Errands, words_of_ending
from freewheel.runtime.files import FileStore
from freewheel.runtime.mover import Mover
from freewheel.runtime.parallel import Answers, Peers
from freewheel.runtime.streams import Streams
from freewheel.spec.errand import Errand, Opening, text_of
from freewheel.spec.filed import KEY_BYTES, Filed
from freewheel.spec.mesh import Mesh
from freewheel.spec.transfer import Transfer, TransferResult, Way
from freewheel.spec.transfer_words import words_of

ROOM = 64
"""Pairs in one answer; what has no room is said in the next one."""

END, NOTHING = -1, -2
"""In the place of a block: the transfer has ended, its damaged blocks were said before; no pair."""

PAUSE = 0.001
"""Seconds between two questions of a host that has nothing else to do."""


class Carrier(Protocol):
    """Who carries the blocks of all ranks: a mover where there is one, otherwise a convoy."""

    @property
    def slots(self) -> int:
        """Of each rank."""
        ...

    def start(self, transfer: Transfer) -> None:
        """It is under way from the next `go_on` on."""
        ...

    def go_on(self) -> None:
        """Do some of the work, waiting for nothing."""
        ...

    def ended(self) -> list[TransferResult]:
        """Transfers that have ended since this was last asked."""
        ...

    def wait(self) -> list[TransferResult]:
        """As `ended`, but at least one, if any is under way: the host waits for it."""
        ...

    def bytes_by(self, way: Way) -> int:
        """Carried so far by one rank of each copy of the model."""
        ...

    def scan(self) -> list[list[Filed]]:
        """What files hold at the start, of each copy, the least recently used first."""
        ...


class Part:
    """What one rank does of all transfers: those of its own copy of the model."""

    def __init__(self, mover: Mover, mesh: Mesh, streams: Streams, peers: Peers) -> None:
        self.mover, self.mesh, self.peers, self._streams = mover, mesh, peers, streams
        self._behind = streams.mark()
        self._untold: deque[tuple[int, int]] = deque()
        self.errands: Errands | None = None
        self.arrivals = Arrivals(mesh)

    def lead(self) -> Carrier:
        """On rank 0: who carries the blocks of all ranks."""
        return self.mover if self.mesh.alone else Convoy(self)

    def start(self, transfers: Iterable[Transfer]) -> None:
        """They are under way. Another rank's letter says that a round is over, not this one's: so
        copies come behind the rounds that were launched here."""
        own = [one for one in transfers if one.replica == self.mesh.replica.index]
        if own:
            with self._streams.rounds():
                self._behind.set()
            self.mover.follow(self._behind)
        for transfer in own:
            self.mover.start(transfer)

    def answer(self) -> Answers:
        """When rank 0 asks: what has ended since the last answer."""
        for result in self.mover.ended():
            self._untold.extend((result.id, block) for block in sorted(result.damaged))
            self._untold.append((result.id, END))
        for number, failure in () if self.errands is None else self.errands.ended():
            self._untold.extend(words_of_ending(number, failure))
        pairs = [self._untold.popleft() for _ in range(min(ROOM, len(self._untold)))]
        pairs += [(0, NOTHING)] * (ROOM - len(pairs))
        return self.peers.ask(torch.tensor(pairs, dtype=torch.int64))  # int64 [ROOM, 2]

    def open_errands(self, opening: Opening, awake: Callable[[], None]) -> tuple[int, ...]:
        """On rank 0: all ranks get ready. Where each of them listens, 0 for one that does not.

        Raises ConfigError if one of them cannot. `awake` is called when this one's have changed.
        """
        self.peers.errand(text_of(opening))
        own = self._opened(opening, awake)
        said = [raw.decode() for raw in self.peers.texts(own.encode())]
        wrong = next((one for one in said if not one.isdigit()), None)
        if wrong is not None:
            raise ConfigError(wrong)
        return tuple(int(port) for port in said)

    def send(self, errand: Errand, own: bool) -> None:
        """On rank 0: have all others run it, and this one too if it is its `own` as well."""
        self.peers.errand(text_of(errand))
        if own:
            self.run(errand)

    def run(self, errand: Errand) -> None:
        """Begin what rank 0 says."""
        if isinstance(errand, Opening):
            self.peers.texts(self._opened(errand, lambda: None).encode())
        elif self.errands is not None:
            self.errands.run(errand)

    def close(self) -> None:
        """Nothing is served or fetched for other engines any more."""
        if self.errands is not None:
            self.errands.close()

    def _opened(self, opening: Opening, awake: Callable[[], None]) -> str:
        """Where this rank listens, or what is wrong."""
        self.close()
        try:
            self.errands = Errands(opening, self.mover, self.mesh, awake)
        except ConfigError as error:
            return str(error)
        return str(self.errands.port)

    def scan(self) -> list[list[Filed]]:
        """On all ranks: what files hold of each copy's blocks, on all of its ranks; other files go.

        The least recently used first, by the clock of the copy's first rank.
        """
        files = self.mover.files
        assert files is not None, "rank 0 has files, so all have"
        own = files.scan()
        told = [_filed_in(raw) for raw in self.peers.texts(_bytes_of(own))]
        tp = self.mesh.tp
        copies = [_common(told[at : at + tp]) for at in range(0, len(told), tp)]
        _keep(files, own, set(copies[self.mesh.replica.index]))
        return copies


@dataclass
class _Open:
    """A transfer under way: how many ranks have yet to end it, and what they found."""

    left: int
    damaged: set[int] = field(default_factory=set[int])


class Convoy:
    """Rank 0's hold on the transfers of all ranks; to its caller, a mover like any other."""

    def __init__(self, part: Part) -> None:
        self._part, self._mesh, self._peers = part, part.mesh, part.peers
        self._new: list[Transfer] = []
        self._open: dict[tuple[int, int], _Open] = {}
        self._asked: Answers | None = None
        self._ended: list[TransferResult] = []
        self._carried: Counter[Way] = Counter()

    @property
    def slots(self) -> int:
        return self._part.mover.slots

    def start(self, transfer: Transfer) -> None:
        """It starts with the next `go_on`."""
        self._new.append(transfer)

    def go_on(self) -> None:
        """Tell the others of what is new, and ask them what has ended, unless they are asked."""
        if self._new:
            new, self._new = self._new, []
            for transfer in new:
                self._opened(transfer)
            self._peers.move(torch.tensor(words_of(new), dtype=torch.int64))
            self._part.start(new)
        self._part.mover.go_on()
        self._read()
        if (self._open or self._part.arrivals.open) and self._asked is None:
            self._peers.settle()
            self._asked = self._part.answer()

    def ended(self) -> list[TransferResult]:
        """Those that have ended on all ranks. Raises RankError if a rank is gone."""
        self._read()
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> list[TransferResult]:
        """As `ended`, but at least one, if any is under way: the host waits for it."""
        while True:
            self.go_on()
            ended = self.ended()
            if ended or not self._open:
                return ended
            self._peers.check()
            time.sleep(PAUSE)

    def bytes_by(self, way: Way) -> int:
        """Carried by one rank of each copy."""
        return self._carried[way] * self._part.mover.slot_bytes

    def scan(self) -> list[list[Filed]]:
        """What files hold of each copy's blocks, see `Part.scan`."""
        self._peers.files()
        return self._part.scan()

    def _opened(self, transfer: Transfer) -> None:
        if transfer.blocks:
            self._open[transfer.replica, transfer.id] = _Open(self._mesh.tp)
            self._carried[transfer.way] += len(transfer.blocks)

    def _read(self) -> None:
        """Take note of the answers, if they are here."""
        if self._asked is None or not self._asked.here:
            return
        answers, self._asked = self._asked.take(), None  # int64 [ranks, ROOM, 2]
        for rank, pairs in enumerate(np.asarray(answers)):
            replica = rank // self._mesh.tp
            for number, block in pairs:
                if block < NOTHING:
                    self._part.arrivals.heard(rank, int(number), int(block))
                elif block != NOTHING:
                    self._said(replica, int(number), int(block))

    def _said(self, replica: int, number: int, block: int) -> None:
        one = self._open[replica, number]
        if block != END:
            one.damaged.add(block)
            return
        one.left -= 1
        if not one.left:
            del self._open[replica, number]
            self._ended.append(TransferResult(number, frozenset(one.damaged), replica))


def _common(lists: Sequence[Sequence[Filed]]) -> list[Filed]:
    """Those of the first list that are in all, in its order."""
    first, *others = lists
    held = [set(other) for other in others]
    return [one for one in first if all(one in other for other in held)]


def _keep(files: FileStore, own: Iterable[Filed], kept: set[Filed]) -> None:
    """Have the files of all other blocks removed: nobody would find them."""
    gone = tuple(one.key for one in own if one not in kept)
    if gone:
        files.start(Transfer(0, Way.DOWN, (), gone=gone), _no_slot)


def _no_slot(index: int) -> memoryview:
    raise IndexError(f"a transfer of no block has no slot {index}")


def _bytes_of(filed: Iterable[Filed]) -> bytes:
    return b"".join(one.key + one.parent + bytes([one.latest]) for one in filed)


def _filed_in(raw: bytes) -> list[Filed]:
    size = 2 * KEY_BYTES + 1
    ones = (raw[at : at + size] for at in range(0, len(raw), size))
    return [Filed(one[:KEY_BYTES], one[KEY_BYTES : 2 * KEY_BYTES], one[-1] == 1) for one in ones]
