# SPDX-License-Identifier: Apache-2.0
"""Pages that rows take over from others: copied on the device, in the stream of rounds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freewheel.spec.plan import StepPlan
from freewheel.state import CachePool, Canary

WORDS = 4
"""A copy of the model, a group, a source and a target."""


def copies_in(plan: StepPlan) -> Tensor:
    """int64 [N, WORDS], on the host: what every copy of the model is to copy before the round."""
    found = [
        (at, copy.group, copy.source, copy.target)
        for at, one in enumerate(plan.each)
        for copy in one.copies
    ]
    return torch.tensor(found, dtype=torch.int64).view(-1, WORDS)


def copy_pages(cache: CachePool, canary: Canary | None, copies: Tensor, replica: int) -> None:
    """Those of copy `replica` of the model. copies: int64 [N, WORDS], on the host.

    The last row of a page is about to be written anew: a canary's sum leaves it out.
    """
    for row in np.asarray(copies):  # host memory
        own, index, source, target = (int(word) for word in row)
        if own != replica:
            continue
        for stored in cache.stored(cache.groups[index].name):
            stored[:, target].copy_(stored[:, source])
        if canary is not None:
            canary.inherit(index, source, target)
