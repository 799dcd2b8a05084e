# SPDX-License-Identifier: Apache-2.0
"""How several processes share one model, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.errors import ConfigError

LAYER_RANKS = "tp"
"""The ranks that share the layers of one copy of the model."""

REPLICA_RANKS = "dp"
"""One rank of each copy: those that hold the same share of layers."""


@dataclass(frozen=True)
class Share:
    """Part `index` of `count` equal parts."""

    index: int = 0
    count: int = 1

    def of(self, size: int) -> range:
        """Which of `size` things are in this part. `size` is a multiple of `count`."""
        part = size // self.count
        return range(self.index * part, (self.index + 1) * part)


@dataclass(frozen=True)
class Mesh:
    """`dp` copies of a model but for its experts, each shared by `tp` ranks; rank 0 plans for all.

    Ranks are numbered copy by copy. The routed experts are spread over all of them.
    `experts_whole`: they are dealt out whole, each to one rank; otherwise every rank has a stretch
    of each expert's width. `scan_split`: the ranks of a copy share the scan of index keys as well.
    Raises ConfigError for a rank that is none of the mesh's.
    """

    tp: int = 1
    rank: int = 0
    experts_whole: bool = False
    dp: int = 1
    scan_split: bool = False

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dp < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"tp: there is no rank {self.rank} among {self.size}")

    @property
    def size(self) -> int:
        """Ranks of all copies."""
        return self.tp * self.dp

    @property
    def alone(self) -> bool:
        """One process holds the whole model."""
        return self.size == 1

    @property
    def replica(self) -> Share:
        """Which of the copies this rank belongs to."""
        return Share(self.rank // self.tp, self.dp)

    @property
    def layer(self) -> Share:
        """What this rank holds of heads, widths and the vocabulary."""
        return Share(self.rank % self.tp, self.tp)

    @property
    def scan(self) -> Share:
        """Which pages of index keys this rank scores: all, unless ranks share the scan."""
        return self.layer if self.scan_split else Share()

    @property
    def experts(self) -> Share:
        """Which experts this rank holds: all of them, unless they are dealt out whole."""
        return self._everywhere if self.experts_whole else Share()

    @property
    def expert_width(self) -> Share:
        """What this rank holds of the width of each of its experts."""
        return Share() if self.experts_whole else self._everywhere

    @property
    def _everywhere(self) -> Share:
        return Share(self.rank, self.size)


ALONE = Mesh()
