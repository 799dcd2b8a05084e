# SPDX-License-Identifier: Apache-2.0
"""`CaptureAudit` by itself, as a CUDA capture uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freewheel.errors import CaptureError
from freewheel.graph import CaptureAudit


def test_the_audit_works_without_a_tape(ops: Any) -> None:
    cache, x, slots = torch.zeros(4, 2), torch.ones(2, 2), torch.tensor([0, 1])
    with CaptureAudit((cache, x, slots)) as audit:
        for _ in range(3):
            ops.store(cache, x + 1, slots)
    assert audit.counts == {"aten::add.Tensor": 3, "freewheel_graph_test::store": 3}
    stray = pytest.raises(CaptureError, match=r"freewheel_graph_test::store uses a tensor")
    with stray, CaptureAudit((cache, slots)):
        ops.store(cache, x, slots)


def test_the_audit_refuses_a_write_to_a_constant_that_no_replay_remakes() -> None:
    with CaptureAudit(()), pytest.raises(CaptureError, match=r"writes to a constant"):
        torch.Tensor([1.0, 2.0]).add_(1)
