# SPDX-License-Identifier: Apache-2.0
"""Blocks of pages on their way between the device and the host's memory, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from freewheel.spec.cache import CacheGroup
from freewheel.spec.filed import Filed

PART_BYTES = 16
"""Where a field of a page begins in a slot is a multiple of this."""

SUM_BYTES = 16
"""Room for a block's checksum behind its pages."""


class Way(StrEnum):
    """Where a transfer goes."""

    OUT = "out"
    """From the device to the host's memory."""
    IN = "in"
    """Back."""
    DOWN = "down"
    """From the host's memory to files."""
    UP = "up"
    """Back."""


@dataclass(frozen=True)
class BlockCopy:
    """Pages of one block and the slot of host memory that holds them.

    `pages[g]`: pages of group g, in the order of the slot's places; none to leave the group out.
    `label`: stands for the block's key in its checksum, so that a slot read for another block's
    is found out. 0 to 2**63 - 1. `filed`: of a copy between the slot and a file, whose it is.
    """

    slot: int
    label: int
    pages: tuple[tuple[int, ...], ...]
    filed: Filed | None = None


@dataclass(frozen=True)
class Transfer:
    """Copies that start and are reported together. `gone`: blocks whose files are to be removed.

    `replica`: the copy of the model whose pages, slots and files these are; ids are its own.
    """

    id: int
    way: Way
    blocks: tuple[BlockCopy, ...]
    gone: tuple[bytes, ...] = ()
    replica: int = 0


@dataclass(frozen=True)
class TransferResult:
    """A transfer of copy `replica` has ended, on all of its ranks. `damaged`: which of its blocks
    were not what their checksum says, or could not be written, on any of them."""

    id: int
    damaged: frozenset[int] = frozenset()
    replica: int = 0


@dataclass(frozen=True)
class SlotPlan:
    """What a slot has room for: `places[g]` pages of group g."""

    groups: tuple[CacheGroup, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, groups: tuple[CacheGroup, ...], block_size: int) -> SlotPlan:
        """One block of `block_size` tokens, and what a row needs that starts behind it."""
        places = (
            block_size // g.page_size if g.retention is None else -(-g.resume_tokens // g.page_size)
            for g in groups
        )
        return cls(groups, tuple(places))

    @property
    def bytes(self) -> int:
        """Of a slot: its parts, each from a multiple of PART_BYTES on, then its checksum."""
        parts = (
            n * sum(-(-g.page_rows * f.row_bytes * len(f.layers) // PART_BYTES) for f in g.fields)
            for g, n in zip(self.groups, self.places, strict=True)
        )
        return PART_BYTES * sum(parts) + SUM_BYTES
