# SPDX-License-Identifier: Apache-2.0
"""What lives on the device: the arena of static tensors, the cache pages, the rows, a step's view.

May import torch, `freewheel.spec`, `freewheel.ops` and `freewheel.errors`. Must never read a
device value, and must never hold a length that the device also holds.
"""

from __future__ import annotations

from freewheel.state.arena import Arena
from freewheel.state.canary import Canary
from freewheel.state.letters import InboxLayout, OutboxLayout
from freewheel.state.picks import Picks
from freewheel.state.pool import CachePool
from freewheel.state.receive import receive, receive_table
from freewheel.state.sequence import SequenceState
from freewheel.state.view import StepView, open_step

__all__ = [
    "Arena",
    "CachePool",
    "Canary",
    "InboxLayout",
    "OutboxLayout",
    "Picks",
    "SequenceState",
    "StepView",
    "open_step",
    "receive",
    "receive_table",
]
