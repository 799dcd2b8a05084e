# SPDX-License-Identifier: Apache-2.0
"""Which stretch of a weight a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.spec.mesh import Share

OUTPUTS, INPUTS, EXPERTS = -2, -1, -3
"""Dimensions of a weight [experts, outputs, inputs], from the last."""


@dataclass(frozen=True)
class Cut:
    """`share` of dimension `dim`, counted from the last.

    `stretches`: the dimension is so many equal stretches, one behind the other, of each of which
    the rank holds its share: the gates and ups of an expert that are stored as one tensor.
    """

    share: Share
    dim: int
    stretches: int = 1

    def length(self, size: int) -> int:
        """What is left of a dimension of `size`."""
        return size // self.share.count

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of what the rank holds of a weight of `shape`."""
        at = len(shape) + self.dim
        return (*shape[:at], self.length(shape[at]), *shape[at + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """What the rank holds of a weight, or of its scales. A view where there is one stretch."""
        dim, share = whole.dim() + self.dim, self.share
        if self.stretches == 1:
            part = whole.shape[dim] // share.count
            return whole.narrow(dim, share.index * part, part)
        apart = whole.unflatten(dim, (self.stretches, share.count, -1))
        return apart.select(dim + 1, share.index).flatten(dim, dim + 1)

    def check(self, name: str, shape: tuple[int, ...], unit: int = 1) -> None:
        """Raise ConfigError, naming the weight, unless it falls into equal parts of whole units.

        `unit`: rows or columns that one scale covers.
        """
        size, count = shape[self.dim] // self.stretches, self.share.count
        if size % (count * unit) == 0:
            return
        what = {OUTPUTS: "rows", INPUTS: "columns", EXPERTS: "experts"}[self.dim]
        blocks = f" in whole blocks of {unit}, which share a scale" if unit > 1 else ""
        raise ConfigError(
            f"tp: {count} ranks cannot share the {size} {what} of {name}{blocks}; "
            "choose a number that divides them"
        )


def check_even(share: Share, size: int, what: str) -> None:
    """Raise ConfigError unless ranks can share `size` things, named by `what`, in equal parts."""
    if size % share.count:
        raise ConfigError(
            f"tp: {share.count} ranks cannot share the {size} {what}; choose a number that "
            "divides them"
        )


def outputs_of(share: Share, stretches: int = 1) -> Cut | None:
    """The rank's rows of a weight, of each of `stretches`; None where there is one rank."""
    return None if share.count == 1 else Cut(share, OUTPUTS, stretches)


def inputs_of(share: Share) -> Cut | None:
    """The rank's columns of a weight; None where there is one rank."""
    return None if share.count == 1 else Cut(share, INPUTS)
