# SPDX-License-Identifier: Apache-2.0
"""Fill memory that nobody may read with values that do not pass unnoticed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["POISON_INT", "poison_"]

POISON_INT = 2**30  # far outside any index, length or token id, yet sums of a few still fit int32


def poison_(tensor: Tensor) -> Tensor:
    """Fill in place with NaN, 2**30 (a narrow integer's largest value) or True; return `tensor`."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(min(POISON_INT, torch.iinfo(tensor.dtype).max))
