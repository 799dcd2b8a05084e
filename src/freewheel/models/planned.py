# SPDX-License-Identifier: Apache-2.0
"""What a rank would hold of a model that is published in the precision its config.json says."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.models.dummy import EXPERTS, DummySource
from freewheel.models.storage import (
    BlockStorage,
    PackedStorage,
    Storage,
    check_cut,
    empty_matrix,
)
from freewheel.nn.cut import Cut
from freewheel.nn.matrix import Matrix
from freewheel.spec.mesh import Mesh
from freewheel.spec.model import ModelSpec


class PlannedSource(DummySource):
    """Weights without memory. `sizes`: bytes that the rank holds, by name.

    With a `quantization_config`, matrices are FP8 in blocks; with `expert_dtype` fp4, experts
    are MXFP4. All else is of the dtype it is asked for, as published checkpoints have it.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh) -> None:
        super().__init__(torch.bfloat16, "meta", mesh)
        self._quantised = spec.quantization is not None
        self._packed = self._quantised and "fp4" in str(spec.quantization)
        self.sizes: dict[str, int] = {}

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        own = self._whole(name, shape if cut is None else cut.shape(shape), dtype)
        if cut is not None:
            cut.check(name, shape)
        self._count(name, own)
        return own

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        own = super().ids(name, shape, below)
        self._count(name, own)
        return own

    def matrix(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Matrix:
        if self._packed and name.endswith(EXPERTS):
            found: Storage = PackedStorage(name, shape, "", packed=True)
        elif self._quantised:
            found = BlockStorage(name, shape, "")
        else:
            return super().matrix(name, shape, cut)
        if cut is not None:
            check_cut(found, cut)
        own = empty_matrix(found, self.dtype, self.device, cut)
        for part in own.tensors():
            self._count(name, part)
        return own

    def _count(self, name: str, part: Tensor) -> None:
        self.sizes[name] = self.sizes.get(name, 0) + part.numel() * part.element_size()
