# SPDX-License-Identifier: Apache-2.0
"""Slots over the very connection on which they were asked for: needs nothing but the network."""

from __future__ import annotations

from collections.abc import Sequence

from freewheel.transfer.line import Line, WireError
from freewheel.transfer.wire import Memory, Pair


class TcpWire:
    """The reader names the slots; their bytes follow, one slot behind the other."""

    name = "tcp"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def card(self) -> dict[str, str]:
        return {}

    def read(self, line: Line, card: dict[str, str], pairs: Sequence[Pair], note: str) -> None:
        line.say({"send": [pair.theirs for pair in pairs]})
        for pair in pairs:
            line.receive_into(self._memory.view(pair.own))
        line.say({"note": note})

    def serve(self, line: Line, slots: Sequence[int], note: str) -> None:
        wanted = line.hear().get("send")
        if not isinstance(wanted, list) or not all(one in slots for one in wanted):
            raise WireError("slots were asked for that are no part of the prompt")
        for slot in wanted:
            line.send(self._memory.view(slot))
        if line.hear().get("note") != note:
            raise WireError("the reader did not say that it has what it wanted")

    def close(self) -> None:
        """Nothing is open."""
