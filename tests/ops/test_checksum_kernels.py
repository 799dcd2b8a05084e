# SPDX-License-Identifier: Apache-2.0
"""The kernel of checksums against its specification: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels
from tests.ops.kernel_device import DEVICE, needs_kernels
from tests.ops.test_checksums import ROWS, case

pytestmark = needs_kernels


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_kernels_give_the_sums_of_the_specification(kind: str) -> None:
    load_kernels("cuda")
    stored, pages, begins, ends, sums, parts, label = case(kind)
    on_device = [one.to(DEVICE) for one in (stored, pages, begins, ends, sums)]
    SPECIFICATIONS["sum_pages"](stored, pages, begins, ends, sums, parts, label)
    IMPLEMENTATIONS["sum_pages", "cuda"](*on_device, parts, label)
    assert torch.equal(on_device[4].cpu(), sums)
