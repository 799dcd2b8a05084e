# SPDX-License-Identifier: Apache-2.0
"""What a letter, an abort or a fault means to one request."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.host.request import Request
from freewheel.spec import FinishReason


@dataclass(slots=True)
class Update:
    """What a letter, or an abort, brought to one request. Not frozen: one is made for every row.

    `tokens`: new output, in order. `accepted`: how many of them, from the first on, were drafts,
    of `drafted` that the round verified. `finish`: why the request ended, or None. A request gets
    exactly one update with a finish, and none after it; none at all if the host ended it by
    `Scheduler.finish`.
    """

    request: Request
    tokens: tuple[int, ...]
    accepted: int
    finish: FinishReason | None
    drafted: int = 0
