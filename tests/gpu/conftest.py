# SPDX-License-Identifier: Apache-2.0
"""Everything here needs a CUDA device and is skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fixtures import closed_form


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random and closed-form checkpoints by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "t32": closed_form.write_t32(root / "t32"),
        "tg": closed_form.write_tg(root / "tg"),
        "perm": closed_form.write_perm(root / "perm"),
        "pen": closed_form.write_pen(root / "pen"),
    }
