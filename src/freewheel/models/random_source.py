# SPDX-License-Identifier: Apache-2.0
"""Weights without a checkpoint: from a seed, or of no memory at all."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from freewheel.nn.cut import Cut
from freewheel.nn.matrix import Matrix, PlainMatrix, copy_into
from freewheel.spec.mesh import ALONE, Mesh


class RandomSource:
    """Weights from a seed, each a function of its name alone; on `meta`, weights without memory.

    Matrices have variance 1 / inputs and norms lie around 1, so that hidden states keep their
    size. `optional`: names that `has` affirms; all else that a checkpoint may leave out is absent.
    """

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        optional: frozenset[str] = frozenset(),
        mesh: Mesh = ALONE,
    ) -> None:
        self._seed = seed
        self._optional = optional
        self.mesh = mesh
        self.dtype = dtype
        self.device = torch.device(device)

    def has(self, name: str) -> bool:
        return name in self._optional

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        """A rank's part of the very weight that one process would draw."""
        if cut is None:
            return self._whole(name, shape, dtype)
        cut.check(name, shape)
        return cut.of(self._whole(name, shape, dtype)).clone()

    def _whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        own = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if self.device.type == "meta":
            return own
        generator = torch.Generator().manual_seed(self._seed ^ zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return own.copy_(values / math.sqrt(shape[-1]))
        centre = 1.0 if name.endswith(".weight") else 0.0
        return own.copy_(centre + values / 8)

    def matrix(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Matrix:
        return PlainMatrix(self.tensor(name, shape, cut=cut))

    def fill(
        self, name: str, shape: tuple[int, ...], target: Matrix, cut: Cut | None = None
    ) -> None:
        copy_into(target, self.matrix(name, shape, cut))

    def settle(self) -> None:
        """Targets are filled at once."""

    def elsewhere(self, name: str, shape: tuple[int, ...]) -> None:
        del name, shape

    def dense(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        return self.tensor(name, shape, dtype, cut)

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.int32, device=self.device)
        generator = torch.Generator().manual_seed(self._seed ^ zlib.crc32(name.encode()))
        values = torch.randint(below, shape, generator=generator, dtype=torch.int32)
        return values.to(self.device)

    def same(self, name: str, other: str) -> bool:
        del name, other
        return False

    def skip(self, pattern: str, reason: str) -> None:
        del pattern, reason
