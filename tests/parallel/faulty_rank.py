# SPDX-License-Identifier: Apache-2.0
"""Rank 1 of two, whose host memory now and then loses a bit of what is to come back from there.

`python -m tests.parallel.faulty_rank STORE`
"""

from __future__ import annotations

import itertools
import sys

import torch

from freewheel.config import keep_to_loopback
from freewheel.runtime.follow import follow_local
from freewheel.runtime.mover import Mover
from freewheel.spec.transfer import BlockCopy, Way

carry = Mover._carry
number = itertools.count()


def _carry(self: Mover, way: Way, copy: BlockCopy) -> None:
    if way is Way.IN and next(number) % 4 == 3:
        self.slot(copy.slot)[5] ^= 16
    carry(self, way, copy)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_to_loopback()
    Mover._carry = _carry  # type: ignore[method-assign]
    follow_local(sys.argv[1], 2, "cpu", 1)
