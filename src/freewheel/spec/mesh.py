# SPDX-License-Identifier: Apache-2.0
"""How several processes share one model, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.errors import ConfigError

LAYER_RANKS = "tp"
"""The ranks that share the layers of one copy of the model."""


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
    """`tp` ranks share every layer of a model; rank 0 of them plans.

    `experts_whole`: routed experts are dealt out whole, each to one rank; otherwise every rank has
    a stretch of each expert's width. Raises ConfigError for a rank that is none of the mesh's.
    """

    tp: int = 1
    rank: int = 0
    experts_whole: bool = False

    def __post_init__(self) -> None:
        if self.tp < 1 or not 0 <= self.rank < self.tp:
            raise ConfigError(f"tp: there is no rank {self.rank} among {self.tp}")

    @property
    def alone(self) -> bool:
        """One process holds the whole model."""
        return self.tp == 1

    @property
    def experts(self) -> Share:
        """Which experts this rank holds: all of them, unless they are dealt out whole."""
        return self.layer if self.experts_whole else Share()

    @property
    def expert_width(self) -> Share:
        """What this rank holds of the width of each of its experts."""
        return Share() if self.experts_whole else self.layer

    @property
    def layer(self) -> Share:
        """What this rank holds of heads, widths and the vocabulary."""
        return Share(self.rank, self.tp)


ALONE = Mesh()
