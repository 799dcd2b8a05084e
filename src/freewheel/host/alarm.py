# SPDX-License-Identifier: Apache-2.0
"""What canaries have found since the engine began, and what is done about it."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from freewheel.host.request import Request
from freewheel.spec import Violation

log = logging.getLogger("freewheel.canary")

PATIENCE = 32
"""Violations in a row, with no token between them, behind which a request is given up: what it
lies on is damaged again and again."""

FAULT = "the canary found its pages or tokens damaged"
"""What a request that it ends is told."""


@dataclass
class Alarm:
    """Counts by kind, and pages that were taken out of use.

    `strict`: a violation ends its request with an error. One alarm outlives schedulers: pages are
    in use again when the scheduler is another, counts go on.
    """

    strict: bool = False
    counts: Counter[str] = field(default_factory=Counter[str])
    pages: int = 0

    def raised(self, request: Request, violation: Violation, pages: int) -> bool:
        """Count one and log it; whether the request is to be computed anew.

        `pages`: of the row, those that were taken out of use just now.
        """
        self.counts.update(violation.kinds)
        self.pages += pages
        stats = request.stats
        same = stats.violated_at == len(request.output)
        stats.violations = stats.violations + 1 if same else 1
        stats.violated_at = len(request.output)
        gives_up = self.strict or stats.violations > PATIENCE
        if gives_up:
            request.fault = FAULT
        log.error(
            "canary: %s of request %s changed (%d pages quarantined); it %s",
            " and ".join(violation.kinds),
            request.id,
            pages,
            "ends" if gives_up else "is computed anew",
        )
        return not gives_up
