# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: a checkpoint, its headers alone, or a seed (protocol: nn.source)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.folder import StoredTensor
from freewheel.nn.source import WeightSource

__all__ = ["Catalogue", "Progress", "RandomSource", "SafetensorsSource", "WeightSource"]

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""

FLOATS = ("BF16", "F16", "F32", "F64")
WHOLE = ("I32", "I64")
"""Dtypes that can be read, by safetensors' names: of weights, and of tables of ids."""

STORED_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8}


MOST_MISSING = 100_000
"""Tensors that a folder may lack before it is the config that must be wrong."""


class Catalogue:
    """Records what a model asks for, and hands out tensors without memory."""

    def __init__(self, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
        self._stored = stored
        self.dtype = dtype
        self.device = torch.device("meta")
        self.wanted: dict[str, tuple[int, ...]] = {}
        self.whole: set[str] = set()
        self.skipped: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        self.wanted[name] = tuple(shape)
        if len(self.wanted) > len(self._stored) + MOST_MISSING:
            raise CheckpointError(
                f"config.json: its num_hidden_layers and n_routed_experts ask for far more tensors "
                f"than the {len(self._stored)} that the folder holds"
            )
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        del below
        self.whole.add(name)
        return self.tensor(name, shape, torch.int32)

    def same(self, name: str, other: str) -> bool:
        del name, other
        return False  # contents are not read here

    def skip(self, pattern: str, reason: str) -> None:
        self.skipped[pattern] = reason


class SafetensorsSource:
    """Copies each tensor once, from a memory-mapped file into its own storage, cast on the way.

    Use it in a `with` block: it holds the files open.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        progress: Progress | None = None,
        total_bytes: int = 0,
    ) -> None:
        self._stored = stored
        self.dtype = dtype
        self.device = torch.device(device)
        self.skipped: dict[str, str] = {}
        self._progress = progress
        self._total = total_bytes
        self._done = 0
        self._open: dict[Path, Any] = {}
        self._files = ExitStack()

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()
        self._files.close()

    def has(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        mapped = self._mapped(name, shape)
        own = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        own.copy_(mapped)
        self._count(name)
        return own

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        mapped = self._mapped(name, shape)
        low, high = (int(bound) for bound in mapped.aminmax())  # of a file: no device is read
        if low < 0 or high >= below:
            raise CheckpointError(
                f"{name}: holds numbers from {low} to {high}; expected 0 to {below - 1}"
            )
        return self.tensor(name, shape, torch.int32)

    def same(self, name: str, other: str) -> bool:
        if not (self.has(name) and self.has(other)):
            return False
        one, two = self._stored[name], self._stored[other]
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            return False
        pieces = zip(self._mapped(name).split(4096), self._mapped(other).split(4096), strict=True)
        if not all(bool((a == b).all()) for a, b in pieces):  # of files: no device is read
            return False
        self._count(name)
        return True

    def skip(self, pattern: str, reason: str) -> None:
        self.skipped[pattern] = reason

    def _count(self, name: str) -> None:
        """The tensor has been read to its end."""
        self._done += stored_bytes(self._stored[name])
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _mapped(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor as a view of its file. Raises CheckpointError if it is not of `shape`."""
        if name not in self._stored:
            raise CheckpointError(f"{name}: the checkpoint holds no such tensor")
        file = self._stored[name].file
        if file not in self._open:
            self._open[file] = self._files.enter_context(safe_open(file, framework="pt"))
        mapped = self._open[file].get_tensor(name)
        if shape is not None and mapped.shape != torch.Size(shape):
            raise CheckpointError(
                f"{name}: expected shape {list(shape)}, found {list(mapped.shape)}"
            )
        return mapped


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
    ) -> None:
        self._seed = seed
        self._optional = optional
        self.dtype = dtype
        self.device = torch.device(device)

    def has(self, name: str) -> bool:
        return name in self._optional

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        own = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if self.device.type == "meta":
            return own
        generator = torch.Generator().manual_seed(self._seed ^ zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return own.copy_(values / math.sqrt(shape[-1]))
        centre = 1.0 if name.endswith(".weight") else 0.0
        return own.copy_(centre + values / 8)

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


def stored_bytes(stored: StoredTensor) -> int:
    """Bytes of the tensor in its file."""
    return math.prod(stored.shape) * STORED_BYTES[stored.dtype]
