# SPDX-License-Identifier: Apache-2.0
"""What each rank does of prompts that change engines, as rank 0 says, and what it says of that.

    rank 0     asks the other engine for a prompt, and finds slots for its blocks (`Task.ERRAND`)
    each rank  of the copy that is to serve it brings its own, from one of the other engine's ranks
    rank 0     hears with the answers to `Task.SETTLE` who has, and who never will

and where prompts are computed, rank 0 says which slots others may read, and when no longer. Threads
do all of it, beside the rounds; a thread ends in time, whatever the other engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from freewheel.errors import ConfigError
from freewheel.runtime.mover import Mover
from freewheel.spec.errand import Bring, Errand, Oblivion, Offer, Opening, Withdrawal
from freewheel.spec.handoff import Piece, WireSettings
from freewheel.spec.mesh import Mesh
from freewheel.transfer import Fetch, Fetcher, Pair, Post, open_wire, read_key

ARRIVED, FAILED, WORD = -3, -4, -5
"""In the place of a block of an answer: the errand has ended, well or not; eight bytes of why not,
in the place of its number."""

WORD_BYTES, MOST_WORDS = 8, 24
"""What is told of a failure is cut there."""


class Errands:
    """One rank's. `awake` is called when something has changed.

    Raises ConfigError if nobody can listen where it is to listen, or there is no such wire or key.
    """

    def __init__(
        self, opening: Opening, mover: Mover, mesh: Mesh, awake: Callable[[], None]
    ) -> None:
        self._mover, self._mesh = mover, mesh
        settings = _own(opening.wire, mesh.rank)
        key = read_key(settings.key_file, warns=not mesh.rank)
        self.wire = open_wire(settings.wire, mover)
        common = (self.wire, opening.layout, settings, awake, key)
        try:
            self.post = Post(*common) if opening.role == "prefill" else None
        except ConfigError:
            self.wire.close()
            raise
        self.fetcher = Fetcher(*common) if opening.role == "decode" else None
        self._under_way: list[tuple[Bring, Fetch]] = []

    @property
    def port(self) -> int:
        """Where others may read; 0 where they do not."""
        return 0 if self.post is None else self.post.port

    def run(self, errand: Errand) -> None:
        """Begin it; nothing is waited for."""
        match errand:
            case Offer() if self._concerns(errand.replica) and self.post is not None:
                pieces = (self._piece(slot) for slot in errand.slots)
                self.post.offer(errand.room, tuple(pieces))
            case Withdrawal() if self.post is not None:
                self.post.withdraw(errand.room)
            case Bring() if self._concerns(errand.replica):
                self._bring(errand)
            case Oblivion():
                self._under_way.clear()
            case _:
                return

    def ended(self) -> Iterator[tuple[int, str | None]]:
        """Numbers of errands that have ended since this was last asked, and why they failed."""
        ended = [one for one in self._under_way if one[1].done]
        for one in ended:
            self._under_way.remove(one)
            errand, fetch = one
            for trip in errand.trips if fetch.failure is None else ():
                self._mover.relabel(trip.own, 0, trip.shift)
            yield errand.number, fetch.failure

    def close(self) -> None:
        """Nothing is served or fetched any more."""
        for one in (self.post, self.fetcher):
            if one is not None:
                one.close()
        self.wire.close()  # last: until then somebody may read

    def _concerns(self, replica: int) -> bool:
        return replica == self._mesh.replica.index

    def _bring(self, errand: Bring) -> None:
        assert self.fetcher is not None, "an engine that fetches"
        port = errand.ports[self._mesh.layer.index % len(errand.ports)]
        pairs = [Pair(trip.own, trip.theirs, 0) for trip in errand.trips]
        fetch = self.fetcher.bring((errand.host, port), errand.room, pairs, errand.seconds)
        self._under_way.append((errand, fetch))

    def _piece(self, slot: int) -> Piece:
        """What a reader must know of it that has been told the rest by rank 0."""
        return Piece(slot, self._mover.address(slot), 0, False, "")


def _own(wire: WireSettings, rank: int) -> WireSettings:
    """Where a rank listens."""
    return replace(wire, port=wire.port + rank if wire.port else 0)


def words_of_ending(number: int, failure: str | None) -> Iterator[tuple[int, int]]:
    """Pairs of an answer, which `Arrivals.heard` reads."""
    raw = (failure or "").encode()[: MOST_WORDS * WORD_BYTES]
    for at in range(0, len(raw), WORD_BYTES):
        word = raw[at : at + WORD_BYTES].ljust(WORD_BYTES, b" ")
        yield int.from_bytes(word, "little", signed=True), WORD
    yield number, ARRIVED if failure is None else FAILED


@dataclass
class _Open:
    """An errand under way: how many ranks have yet to end it, and what the first says that
    failed."""

    left: int
    failure: str | None = None


class Arrivals:
    """On rank 0: what ranks say of errands. One has ended when all ranks of its copy have said so,
    well if all did well: until then some of them may still write to its slots."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._open: dict[int, _Open] = {}
        self._words: dict[int, bytes] = {}
        self._ended: dict[int, str | None] = {}

    @property
    def open(self) -> bool:
        """Some errand is under way."""
        return bool(self._open)

    def begin(self, number: int) -> None:
        self._open[number] = _Open(self._mesh.tp)

    def heard(self, rank: int, number: int, what: int) -> None:
        """One pair of a rank's answer, which is of an errand."""
        if what == WORD:
            raw = number.to_bytes(WORD_BYTES, "little", signed=True)
            self._words[rank] = self._words.get(rank, b"") + raw
            return
        said, one = self._words.pop(rank, b"").decode(errors="replace"), self._open.get(number)
        if one is None:
            return  # forgotten meanwhile
        if what == FAILED and one.failure is None:
            one.failure = f"rank {rank}: {said.strip()}"
        one.left -= 1
        if not one.left:
            self._ended[number] = self._open.pop(number).failure

    def ended(self) -> dict[int, str | None]:
        """Of errands that have ended since this was last asked: None, or why one failed."""
        ended, self._ended = self._ended, {}
        return ended

    def forget(self) -> None:
        """Of those under way nobody wants to hear."""
        self._open.clear()
        self._ended.clear()
