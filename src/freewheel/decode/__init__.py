# SPDX-License-Identifier: Apache-2.0
"""The program that is captured: the round, the rule of choice, the drafters.

May import torch, `freewheel.spec`, `freewheel.ops`, `freewheel.state` and `freewheel.models.base`.
Must never read a device value, branch on one, or know which kind of forward it runs.
"""

from __future__ import annotations

from freewheel.decode.chain import ChainDrafter
from freewheel.decode.drafter import Drafter, NoDrafter, Verified
from freewheel.decode.forced import ForcedTarget
from freewheel.decode.lookup import LookupDrafter
from freewheel.decode.round import Round

__all__ = [
    "ChainDrafter",
    "Drafter",
    "ForcedTarget",
    "LookupDrafter",
    "NoDrafter",
    "Round",
    "Verified",
]
