# SPDX-License-Identifier: Apache-2.0
"""Several processes that hold one model: how they are started, what they tell each other, and when.

Rank 0 is the engine that users know: it alone has a scheduler, and plans. Before it launches a
round it sends the round's letter to the other ranks, its followers; each of them uploads the same
letter and replays the same graph, in which they meet in collectives. A follower decides nothing on
the host, and brings nothing home.

Groups, stores and collectives are torch.distributed's, processes are started and watched by its
elastic launcher's own parts. No object crosses but bytes in tensors that exist before.
"""

from __future__ import annotations

from freewheel.runtime.parallel.channel import Channel, Order, Task
from freewheel.runtime.parallel.crew import Crew, assemble, join_launched, kill_ranks
from freewheel.runtime.parallel.peers import Alone, Answers, Follower, Leader, Peers

__all__ = [
    "Alone",
    "Answers",
    "Channel",
    "Crew",
    "Follower",
    "Leader",
    "Order",
    "Peers",
    "Task",
    "assemble",
    "join_launched",
    "kill_ranks",
]
