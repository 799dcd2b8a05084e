# SPDX-License-Identifier: Apache-2.0
"""Where the tests of kernels run: on a GPU, or without one in Triton's interpreter.

A test file that imports this is skipped where there is no Triton.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
needs_kernels = pytest.mark.skipif(
    not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
