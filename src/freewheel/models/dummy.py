# SPDX-License-Identifier: Apache-2.0
"""Weights for measuring speed: drawn on the device, so that nothing is read and nothing travels."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from freewheel.models.header import StoredTensor
from freewheel.models.random_source import RandomSource
from freewheel.nn.cut import Cut
from freewheel.spec.mesh import ALONE, Mesh

EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")

EXPERT_LAYERS = 8
"""Layers with experts of their own; the others use these in turn. One layer's experts are larger
than any cache of a GPU at the dimensions of published models, so this changes the memory taken and
not the time."""


class DummySource(RandomSource):
    """Random weights of any shape asked for, each a function of its name alone.

    Matrices have variance 1 / inputs, so that hidden states keep their size; norms lie around 1.
    Routers have no bias, and random ones spread tokens evenly over their experts.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device, mesh: Mesh = ALONE) -> None:
        super().__init__(0, dtype, device, mesh=mesh)
        self.wanted: dict[str, StoredTensor] = {}
        self._experts: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return name.endswith(EXPERTS)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        """Of a weight that ranks share, each draws its own part: the whole is never made."""
        self.wanted[name] = StoredTensor(Path(), tuple(shape), "BF16", 0, 0)
        if cut is not None:
            cut.check(name, shape)
        if not name.endswith(EXPERTS):
            return self._draw(name, shape, dtype, cut)
        shared = _shared_name(name)
        if shared not in self._experts:
            self._experts[shared] = self._draw(shared, shape, dtype, cut)
        return self._experts[shared]

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        self.wanted[name] = StoredTensor(Path(), tuple(shape), "I32", 0, 0)
        own = torch.empty(shape, dtype=torch.int32, device=self.device)
        return own if own.is_meta else own.random_(0, below, generator=self._seeded(name, None))

    def _draw(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, cut: Cut | None
    ) -> Tensor:
        own_shape = shape if cut is None else cut.shape(shape)
        own = torch.empty(own_shape, dtype=dtype or self.dtype, device=self.device)
        if own.is_meta:
            return own
        if name.endswith("bias"):
            return own.zero_()
        if len(shape) > 1:
            return own.normal_(0, shape[-1] ** -0.5, generator=self._seeded(name, cut))
        centre = 1.0 if name.endswith("weight") else 0.0
        return own.normal_(centre, 0.1, generator=self._seeded(name, cut))

    def _seeded(self, name: str, cut: Cut | None) -> torch.Generator:
        part = 0 if cut is None else cut.share.index
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) + part)


def _shared_name(name: str) -> str:
    """The name under which experts are kept: its layer's number, counted round EXPERT_LAYERS."""
    parts = name.split(".")
    return ".".join(str(int(p) % EXPERT_LAYERS) if p.isdigit() else p for p in parts)
