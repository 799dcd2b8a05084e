# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import closed_form, compressed


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The closed-form and random checkpoints by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "t32": closed_form.write_t32(root / "t32"),
        "tg": closed_form.write_tg(root / "tg"),
        "t4": compressed.write_t4(root / "t4"),
        "perm": closed_form.write_perm(root / "perm"),
        "perm_x": closed_form.write_perm_x(root / "perm_x"),
        "pen": closed_form.write_pen(root / "pen"),
    }
