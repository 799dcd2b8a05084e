# SPDX-License-Identifier: Apache-2.0
"""Prompts that change engines: blocks in host memory that another engine reads, or has sent.

They travel from host memory to host memory. The engine that computes a prompt copies its blocks
there behind the rounds, as it does with all blocks; what arrives lies where the blocks of earlier
requests lie, and is fetched from there, checked by its checksum, as these are. So nothing else
needs to know of it, and what does not arrive is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from freewheel.host.keys import DIGEST_BYTES
from freewheel.host.moves import Moves, label_of
from freewheel.host.prefix import PrefixCache
from freewheel.host.request import Request
from freewheel.host.tier import Kept
from freewheel.spec.handoff import Piece


@dataclass(frozen=True)
class Arriving:
    """A block that comes into the slot `kept.slot`, from where it is called `piece`."""

    kept: Kept
    piece: Piece

    @property
    def label(self) -> int:
        """What its checksum counts in here."""
        return label_of(self.kept.key)


@dataclass(frozen=True)
class Parcels:
    """What of a prompt's blocks is in host memory, and room there for what comes."""

    _prefix: PrefixCache
    _moves: Moves

    def pack(self, request: Request, late: bool) -> list[Kept] | None:
        """The prompt's blocks, in their order, held until `release`; None if some are on their way
        to host memory. `late`: then those before the first of these."""
        held: list[Kept] = []
        for key in self._prompt_keys(request):
            kept, block = self._moves.tier.find(key), self._prefix.block(key)
            if kept is None and block is None:
                break
            whole = kept is not None and (kept.latest or block is None or block.latest is None)
            if kept is None or not kept.ready or not whole:
                if not late:
                    if block is not None:
                        self._moves.kept(key)
                    return None
                if kept is None or not kept.ready:
                    break
            held.append(kept)
        for kept in held:
            kept.readers += 1
        return held

    def release(self, held: Sequence[Kept]) -> None:
        """Nobody reads these any more."""
        for kept in held:
            kept.readers -= 1
            self._moves.tier.settled(kept)

    def wanted(self, request: Request) -> tuple[int, int]:
        """The first of the prompt's blocks that is to be fetched, and that behind the last."""
        most = min(len(self._prompt_keys(request)), request.reusable // self._prefix.block_size)
        return min(self._moves.reach(request), most), most

    def expect(self, request: Request, first: int, pieces: Sequence[Piece]) -> list[Arriving]:
        """Room for the prompt's blocks from the `first` on, which are to arrive as `pieces`.

        Only for those whose tokens are the request's, up to the last one behind which a row can
        start, and as far as there is room.
        """
        keys, digests, tier = self._prompt_keys(request), self.digests(request), self._moves.tier
        good = 0
        for at, piece in enumerate(pieces[: len(keys) - first]):
            if piece.tokens != digests[first + at]:
                break
            good = at + 1 if piece.latest else good
        room: list[Arriving] = []
        for at, piece in enumerate(pieces[:good], first):
            kept = tier.find(keys[at])
            if kept is not None:
                if kept.busy or kept.latest or not piece.latest:
                    continue  # it is here, or on its way
                tier.discard(kept)
            kept = tier.take(keys[at], reversed(keys[:at]), piece.latest)
            if kept is None:
                break
            room.append(Arriving(kept, piece))
        self._moves.arriving += len(room)
        return room

    def arrived(self, blocks: Sequence[Arriving], whole: bool) -> None:
        """They are here, or, unless `whole`, never will be."""
        self._moves.arriving -= len(blocks)
        for block in blocks:
            block.kept.ready = True
            if block.kept.gone:
                self._moves.tier.settled(block.kept)
            elif not whole:
                self._moves.tier.discard(block.kept)

    def digests(self, request: Request) -> list[str]:
        """Of all tokens that the pages of each of the prompt's blocks follow from, and of the salt.

        As a block's key, but alike in every engine: who salts otherwise finds nothing here either.
        """
        size, found = self._prefix.block_size, list[str]()
        before = request.cache_salt.encode()
        for at in range(0, self._prompt_blocks(request) * size, size):
            tokens = request.prompt[at + 1 if at else 0 : at + size + 1]
            before = blake2b(
                before + array("q", tokens).tobytes(), digest_size=DIGEST_BYTES
            ).digest()
            found.append(before.hex())
        return found

    def pieces(self, request: Request, held: Sequence[Kept], where: Sequence[int]) -> list[Piece]:
        """What to tell of held blocks. `where`: the addresses of their slots."""
        return [
            Piece(kept.slot, address, label_of(kept.key), kept.latest, tokens)
            for kept, address, tokens in zip(held, where, self.digests(request), strict=False)
        ]

    def _prompt_blocks(self, request: Request) -> int:
        """Behind each of them the prompt has a token."""
        return (len(request.prompt) - 1) // self._prefix.block_size

    def _prompt_keys(self, request: Request) -> list[bytes]:
        return self._prefix.keys(request)[: self._prompt_blocks(request)]
