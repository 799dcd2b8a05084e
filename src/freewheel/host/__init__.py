# SPDX-License-Identifier: Apache-2.0
"""The host's half: requests, pages, rounds and text, in whole numbers and strings.

May import the standard library, `freewheel.spec` and `freewheel.errors`. Must never import torch
or numpy: no value of the device can be read here by mistake.
"""

from __future__ import annotations

from freewheel.host.alarm import Alarm
from freewheel.host.costs import Arrived
from freewheel.host.depth import DepthPolicy
from freewheel.host.disk import DiskIndex
from freewheel.host.fleet import Fleet
from freewheel.host.guide import Guide
from freewheel.host.pages import PageAllocator, RowAllocator
from freewheel.host.parcels import Arriving, Parcels
from freewheel.host.request import Request, RequestState, RequestStats
from freewheel.host.scheduler import Scheduler
from freewheel.host.shelf import Shelf
from freewheel.host.text import TextDelta, TextStream
from freewheel.host.update import Update

__all__ = [
    "Alarm",
    "Arrived",
    "Arriving",
    "DepthPolicy",
    "DiskIndex",
    "Fleet",
    "Guide",
    "PageAllocator",
    "Parcels",
    "Request",
    "RequestState",
    "RequestStats",
    "RowAllocator",
    "Scheduler",
    "Shelf",
    "TextDelta",
    "TextStream",
    "Update",
]
