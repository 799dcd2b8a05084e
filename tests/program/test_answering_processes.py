# SPDX-License-Identifier: Apache-2.0
"""A process for questions that does not start; what else it may do wrong is in `tests/faults`."""

from __future__ import annotations

import pytest

from freewheel.errors import StartError
from tests.faults.processes import BEGIN, process


@pytest.mark.parametrize(
    "script", ["raise SystemExit", BEGIN, BEGIN + 'say(b\'{"error": "it needs nothing"}\\n\')']
)
def test_a_process_that_does_not_start_says_so(script: str) -> None:
    with pytest.raises(StartError):
        process(script).ask({}, seconds=1)
