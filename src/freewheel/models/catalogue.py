# SPDX-License-Identifier: Apache-2.0
"""A source that has headers alone: it records what a model asks for and takes no memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.models.header import StoredTensor
from freewheel.models.storage import (
    WHOLE,
    BlockStorage,
    PackedStorage,
    PlainStorage,
    Storage,
    Wanted,
    find_storage,
)
from freewheel.nn.matrix import BlockMatrix, Matrix, PackedMatrix, PlainMatrix

MOST_MISSING = 100_000
"""Tensors that a folder may lack before it is the config that must be wrong."""


class Catalogue:
    """Records what a model asks for, and hands out tensors without memory.

    `wanted`: by stored name, in the order of the requests. `repeated`: what was asked for twice.
    `parameters`: numbers asked for, whatever they are stored as.
    `storages`: how each weight is stored that may be quantised. `held`: what each tensor is held
    as, for people.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
        self._stored = stored
        self.dtype = dtype
        self.device = torch.device("meta")
        self.wanted: dict[str, Wanted] = {}
        self.repeated: list[str] = []
        self.storages: dict[str, Storage] = {}
        self.held: dict[str, str] = {}
        self.parameters = 0
        self.skipped: dict[str, str] = {}

    def missing(self) -> list[str]:
        """What was asked for and is not stored, with its shape."""
        absent = sorted(self.wanted.keys() - self._stored.keys())
        return [f"{name} {list(self.wanted[name].shape)}" for name in absent]

    def has(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        self._record(shape, {name: Wanted(tuple(shape))})
        return self._plain(name, shape, dtype or self.dtype)

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        del below
        self._record(shape, {name: Wanted(tuple(shape), WHOLE)})
        return self._plain(name, shape, torch.int32)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        held = self._held(self._find(name, shape))
        self.held[name] = held.storage
        return held

    def fill(self, name: str, shape: tuple[int, ...], target: Matrix) -> None:
        own = self._held(self._find(name, shape))
        if self.has(name) and own.storage != target.storage:
            raise UnsupportedModel(
                f"{self._place(name)}: stored as {self._stored[name].dtype}, and the first of the "
                f"experts with which it is joined as {target.storage}; they must be stored alike"
            )
        self.held[name] = own.storage

    def settle(self) -> None:
        """Nothing is read."""

    def dense(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        self._find(name, shape)
        return self._plain(name, shape, dtype or self.dtype)

    def same(self, name: str, other: str) -> bool:
        del name, other
        return False  # contents are not read here

    def skip(self, pattern: str, reason: str) -> None:
        self.skipped[pattern] = reason

    def _find(self, name: str, shape: tuple[int, ...]) -> Storage:
        found = find_storage(self._stored, name, tuple(shape))
        self._record(shape, found.wanted())
        self.storages[name] = found
        return found

    def _plain(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        own = self._empty(shape, dtype)
        self.held[name] = PlainMatrix(own).storage
        return own

    def _held(self, found: Storage) -> Matrix:
        match found:
            case PlainStorage():
                return PlainMatrix(self._empty(found.shape, self.dtype))
            case BlockStorage():
                values = self._empty(found.shape, torch.float8_e4m3fn)
                return BlockMatrix(values, self._empty(found.grid, torch.float32))
            case PackedStorage():
                values = self._empty(found.bytes_shape, torch.uint8)
                return PackedMatrix(values, self._empty(found.grid, torch.uint8))

    def _record(self, shape: tuple[int, ...], wanted: dict[str, Wanted]) -> None:
        self.parameters += math.prod(shape)
        self.repeated.extend(wanted.keys() & self.wanted.keys())
        self.wanted |= wanted
        if len(self.wanted) > len(self._stored) + MOST_MISSING:
            raise CheckpointError(
                f"config.json: its num_hidden_layers and n_routed_experts ask for far more tensors "
                f"than the {len(self._stored)} that the folder holds"
            )

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _place(self, name: str) -> str:
        found = self._stored.get(name)
        return name if found is None else f"{name} (in {found.file.name})"
