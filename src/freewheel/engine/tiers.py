# SPDX-License-Identifier: Apache-2.0
"""How full the tiers below the device are, and what moved between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from freewheel.host.reserve import Reservations
from freewheel.runtime.convoy import Carrier
from freewheel.spec import Way


@dataclass(frozen=True)
class TierLoad:
    """The tiers of the prefix cache below the device: blocks of all copies of the model, and bytes
    that one rank of each copied.

    `lost`: blocks that left the device while too many were on their way. `damaged`: blocks that
    were not what their checksum said.
    """

    slots: int
    used: int
    stored: int
    fetched: int
    evicted: int
    lost: int
    damaged: int
    bytes_out: int
    bytes_in: int


@dataclass(frozen=True)
class DiskLoad:
    """Files below host memory: blocks, and bytes written and read. `failed`: blocks that could not
    be written; `damaged`: files that were not what was written."""

    blocks: int
    used: int
    stored: int
    fetched: int
    evicted: int
    damaged: int
    failed: int
    bytes_out: int
    bytes_in: int


def tier_load(reserved: Sequence[Reservations], carrier: Carrier) -> TierLoad | None:
    """Of host memory, of all copies of the model; None where there is none."""
    moves = [one.moves for one in reserved if one.moves is not None]
    if not moves:
        return None
    return TierLoad(
        slots=sum(one.tier.slots for one in moves),
        used=sum(len(one.tier) for one in moves),
        bytes_out=carrier.bytes_by(Way.OUT),
        bytes_in=carrier.bytes_by(Way.IN),
        **_together(asdict(one.counts) for one in moves),
    )


def disk_load(reserved: Sequence[Reservations], carrier: Carrier) -> DiskLoad | None:
    """Of files, of all copies of the model; None where there are none."""
    moves = [one.moves for one in reserved if one.moves is not None]
    disks = [one.disk for one in moves if one.disk is not None]
    if not disks:
        return None
    return DiskLoad(
        blocks=sum(one.index.blocks for one in disks),
        used=sum(len(one.index) for one in disks),
        bytes_out=carrier.bytes_by(Way.DOWN),
        bytes_in=carrier.bytes_by(Way.UP),
        **_together(asdict(one.counts) for one in disks),
    )


def _together(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sums, name by name."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
