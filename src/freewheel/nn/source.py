# SPDX-License-Identifier: Apache-2.0
"""Where a part gets its tensors from, and how to list the tensors that a built part holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Protocol

import torch
from torch import Tensor

from freewheel.nn.cut import Cut
from freewheel.nn.matrix import Matrix
from freewheel.spec.mesh import Mesh


class WeightSource(Protocol):
    """Hands out weights by checkpoint name. Every request is checked against the checkpoint.

    Shapes are those of whole weights. With a `cut`, what is handed out is the rank's part alone,
    and nothing else is read; ConfigError if the weight does not fall into equal parts.
    """

    @property
    def mesh(self) -> Mesh:
        """The ranks that share the model, and which of them this one is."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What weights are computed in, unless a request says otherwise."""
        ...

    @property
    def device(self) -> torch.device:
        """Where weights lie."""
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint stores a tensor of this name."""
        ...

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        """The tensor, of `dtype` (the source's if None); what is stored quantised is refused.

        Raises CheckpointError if the checkpoint has none.
        """
        ...

    def matrix(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Matrix:
        """The weight [..., N, K] with its scales, in the precision in which it is stored."""
        ...

    def fill(
        self, name: str, shape: tuple[int, ...], target: Matrix, cut: Cut | None = None
    ) -> None:
        """As `matrix`, into `target`, which may not be looked at before `settle`.

        Raises UnsupportedModel if it is stored otherwise.
        """
        ...

    def settle(self) -> None:
        """Return when every target of `fill` holds its weight, for who comes behind on its stream.

        Raises CheckpointError if a file ended too soon.
        """
        ...

    def elsewhere(self, name: str, shape: tuple[int, ...]) -> None:
        """Another rank holds the weight: it is accounted for, and not read."""
        ...

    def dense(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        """The weight [..., N, K] as numbers of `dtype` (the source's if None), however stored.

        For weights that no quantised op takes.
        """
        ...

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        """int32: the stored whole numbers. Raises CheckpointError unless in 0 .. `below` - 1."""
        ...

    def same(self, name: str, other: str) -> bool:
        """Whether both tensors are stored and hold the same values, so that one serves for both."""
        ...

    def skip(self, pattern: str, reason: str) -> None:
        """Stored tensors whose names match `pattern` (as in fnmatch) need not be asked for."""
        ...


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What decisions are computed in: float32, or float64 in a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def held_tensors(*parts: object) -> tuple[Tensor, ...]:
    """Every tensor that the parts hold, each once: the addresses that a graph may record."""
    found: dict[int, Tensor] = {}
    for part in parts:
        for tensor in _walk(part):
            found.setdefault(id(tensor), tensor)
    return tuple(found.values())


def _walk(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _walk(item)
    elif is_dataclass(part):
        for item in vars(part).values():
            yield from _walk(item)
