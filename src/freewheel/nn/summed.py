# SPDX-License-Identifier: Apache-2.0
"""Parts of which every rank computes a share, whose results are summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from freewheel import ops
from freewheel.spec.mesh import LAYER_RANKS, Mesh

P = TypeVar("P", bound=Callable[..., Tensor])


@dataclass(frozen=True)
class Summed(Generic[P]):
    """What `part` gives, summed over the ranks of `group`: the same bits on every rank.

    `part` makes a new tensor at every call, which the sum replaces.
    """

    part: P
    group: str

    def __call__(self, *inputs: Tensor) -> Tensor:
        own = self.part(*inputs)
        ops.all_reduce(own, self.group)
        return own


def summed(part: P, mesh: Mesh) -> P | Summed[P]:
    """`part` itself where one rank holds all layers of its copy of the model."""
    return part if mesh.tp == 1 else Summed(part, LAYER_RANKS)
