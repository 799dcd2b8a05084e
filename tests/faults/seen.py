# SPDX-License-Identifier: Apache-2.0
"""What comes of a fault, in the words of docs/faults.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

NOTHING = "nothing"
SAME = "the same"
ENGINE_ERROR = "500 `engine_error`"
ENGINE_LOST = "503 `engine_lost`"
NOT_READY = "503 `not_ready`"
REFUSED = "400, names the field"


@dataclass
class Seen:
    """What the request was told that a fault struck, and what others saw. `seconds`: from the fault
    on until all was as before; it runs from when this is made until `over`."""

    told: str = NOTHING
    others: str = NOTHING
    seconds: float = 0.0
    begun: float = field(default_factory=time.monotonic)

    def over(self, told: str | None = None, others: str | None = None) -> Seen:
        """All is as before."""
        self.seconds = time.monotonic() - self.begun
        self.told, self.others = told or self.told, others or self.others
        return self


Strike = Callable[[pytest.FixtureRequest], Seen]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `within`: seconds in which all is as before, on a machine that does ten
    other things as well: whoever waits longer has been forgotten. None: nothing has to recover, or
    another process does.

    `when`: what stands in the list instead of the seconds. `rare`: struck by the exhaustive suite.
    """

    name: str
    strike: Strike
    told: str
    others: str = NOTHING
    within: float | None = None
    when: str = ""
    rare: bool = False
    slow: bool = False

    @property
    def line(self) -> str:
        """Of the list in docs/faults.md."""
        when = self.when or ("" if self.within is None else f"{self.within:g} s")
        return f"| {self.name} | {self.told} | {self.others} | {when} |"
