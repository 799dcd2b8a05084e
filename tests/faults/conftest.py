# SPDX-License-Identifier: Apache-2.0
"""What strikes asserts as tests do, and on the same checkpoints."""

from __future__ import annotations

import pytest

from tests.program.conftest import folders

__all__ = ["folders"]

pytest.register_assert_rewrite(
    *(f"tests.faults.{name}" for name in ("rounds", "pages", "processes", "line", "server"))
)
