# SPDX-License-Identifier: Apache-2.0
"""How the bytes of slots go from one engine to another: the one thing that differs by hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from freewheel.transfer.line import Line


class Memory(Protocol):
    """Slots of host memory, all of one size."""

    @property
    def slot_bytes(self) -> int: ...

    def address(self, slot: int) -> int:
        """Where it begins, in this process."""
        ...

    def view(self, slot: int) -> memoryview:
        """uint8 [slot_bytes]."""
        ...

    def stretches(self) -> list[tuple[int, int]]:
        """(address, bytes) of the memory in which slots lie."""
        ...


@dataclass(frozen=True)
class Pair:
    """Slot `own` becomes what the other engine has at `address`, which is its slot `theirs`."""

    own: int
    theirs: int
    address: int


class Wire(Protocol):
    """One end of it. Used by several threads, each with a line of its own."""

    @property
    def name(self) -> str: ...

    def card(self) -> dict[str, str]:
        """What a reader must know of this engine's memory: JSON."""
        ...

    def read(self, line: Line, card: dict[str, str], pairs: Sequence[Pair], note: str) -> None:
        """Copy all pairs; returns when they are here. The other end is in `serve` meanwhile, which
        hears `note` once it is no longer needed. Raises WireError."""
        ...

    def serve(self, line: Line, slots: Sequence[int], note: str) -> None:
        """Stand by until the reader has what it wants of `slots`, or is gone. Raises WireError if
        it went without a word."""
        ...

    def close(self) -> None: ...
