# SPDX-License-Identifier: Apache-2.0
"""Which rectangle the rows of a round run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freewheel.errors import ConfigError
from freewheel.host.depth import DepthPolicy
from freewheel.host.seats import Seat, extras_of, guided_of, prompt_shape
from freewheel.spec import ShapeLadder, StepShape


class Rectangles:
    """The smallest of a ladder that hold the rows; of a depth that `policy` chooses."""

    def __init__(self, ladder: ShapeLadder, policy: DepthPolicy | None) -> None:
        """Raises ConfigError if nobody chooses among the ladder's depths, or among others."""
        if policy is None and len(ladder.depths) != 1:
            raise ConfigError(f"ladder: has depths {ladder.depths} and nobody to choose one")
        if policy is not None and policy.depths != ladder.depths:
            raise ConfigError(f"policy: chooses among {policy.depths}, not {ladder.depths}")
        self._ladder, self._policy = ladder, policy
        self._found: dict[tuple[int, int, bool, int], StepShape] = {}

    def of(self, copies: Sequence[list[Seat]], prompts: bool) -> StepShape:
        """For the rows of every copy of the model; some copy has some."""
        batch = max(len(seats) for seats in copies)
        seats = [seat for own in copies for seat in own]
        if prompts:
            return prompt_shape(seats, self._ladder, batch)
        extras, guided = extras_of(seats), guided_of(seats)
        if self._policy is None:
            return self._fit(batch, extras, guided, self._ladder.depth)
        load = self._fit(batch, extras, guided, self._policy.depths[0])
        if load.depth:
            load = replace(load, width=1, depth=0)
        rows = [seat.request.id for seat in seats if not seat.request.guided]
        depth = self._policy.choose(load, rows, len(seats) - len(rows))
        lag = max(seat.tenancy.lag for seat in seats)
        if lag > (0 if depth else self._ladder.lag - 1):
            return replace(self._fit(batch, extras, guided, 0), catches_up=True)
        return self._fit(batch, extras, guided, depth)

    def _fit(self, rows: int, extras: int, guided: bool, depth: int) -> StepShape:
        """As the ladder says, which need not be searched in every round."""
        key = rows, extras, guided, depth
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._ladder.fit_decode(*key)
        return found
