# SPDX-License-Identifier: Apache-2.0
"""Every static tensor of the engine, by name: the addresses that a captured graph may hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from freewheel.errors import CaptureError


class Arena:
    """Owns or adopts the tensors that outlive a round. `seal` it before the first capture."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._tensors: dict[str, Tensor] = {}
        self._sealed = False

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: float = 0) -> Tensor:
        """A tensor of the arena's own, filled with `fill`. Raises CaptureError once sealed."""
        return self.adopt(name, torch.full(shape, fill, dtype=dtype, device=self.device))

    def new_undefined(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose every element is written before it is read.

        On a CPU the memory of elements that are never written is never taken. Raises CaptureError
        once sealed.
        """
        return self.adopt(name, torch.empty(shape, dtype=dtype, device=self.device))

    def adopt(self, name: str, tensor: Tensor) -> Tensor:
        """Register a tensor made elsewhere (a weight). Raises CaptureError once sealed."""
        if self._sealed:
            raise CaptureError(
                f"{name}: the arena is sealed; static tensors are made before capture"
            )
        if name in self._tensors:
            raise CaptureError(f"{name}: the arena already holds a tensor of that name")
        self._tensors[name] = tensor
        return tensor

    def seal(self) -> None:
        """No further tensor is static."""
        self._sealed = True

    def tensors(self) -> Iterable[Tensor]:
        return self._tensors.values()

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def sizes(self) -> dict[str, int]:
        """Bytes by the part of the name before the first dot, largest first."""
        sizes: dict[str, int] = {}
        for name, tensor in self._tensors.items():
            part = name.split(".", 1)[0]
            sizes[part] = sizes.get(part, 0) + tensor.numel() * tensor.element_size()
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))
