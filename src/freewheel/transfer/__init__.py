# SPDX-License-Identifier: Apache-2.0
"""Pages of a prompt from one engine's host memory to another's.

    reader   "room 17, of blocks of this layout, from the 3rd block on"
    post     waits until the prompt is computed and its blocks are in host memory; names the slots
    reader   copies them into slots of its own, by NIXL or over the same connection; says so
    post     lets go of its own

Where engines have several ranks, this line stays with rank 0 of both, and holds the blocks. Each
rank of the reader brings what it needs over a line of its own to one rank of the other engine.

All of it happens in threads of its own beside the rounds: the engine only looks what has come. May
import the standard library, `freewheel.spec` and `freewheel.errors`.
"""

from __future__ import annotations

from freewheel.transfer.fetcher import Fetch, Fetcher
from freewheel.transfer.keys import Key, read_key
from freewheel.transfer.line import WireError
from freewheel.transfer.opening import open_wire
from freewheel.transfer.post import Post
from freewheel.transfer.wire import Memory, Pair, Wire

__all__ = [
    "Fetch",
    "Fetcher",
    "Key",
    "Memory",
    "Pair",
    "Post",
    "Wire",
    "WireError",
    "open_wire",
    "read_key",
]
