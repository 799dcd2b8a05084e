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
    PlainStorage,
    Request,
    Storage,
    Wanted,
    check_cut,
    empty_matrix,
    find_storage,
)
from freewheel.nn.cut import Cut
from freewheel.nn.matrix import Matrix
from freewheel.spec.mesh import ALONE, Mesh

MOST_MISSING = 100_000
"""Tensors that a folder may lack before it is the config that must be wrong."""


class Catalogue:
    """Records what a model asks for, and hands out tensors without memory.

    `wanted`: by stored name, in the order of the requests. `repeated`: what was asked for twice.
    `parameters`: numbers asked for, whatever they are stored as.
    `storages`: how each weight is stored that may be quantised. `held`: what each tensor is held
    as, for people. `parts`: into how many a stored tensor is cut, of which one is read; 0 if
    another rank reads it. `requests`: for what a source is to hand out, in order.
    """

    def __init__(
        self, stored: Mapping[str, StoredTensor], dtype: torch.dtype, mesh: Mesh = ALONE
    ) -> None:
        self._stored = stored
        self.mesh = mesh
        self.dtype = dtype
        self.device = torch.device("meta")
        self.wanted: dict[str, Wanted] = {}
        self.repeated: list[str] = []
        self.storages: dict[str, Storage] = {}
        self.held: dict[str, str] = {}
        self.parameters = 0
        self.skipped: dict[str, str] = {}
        self.parts: dict[str, int] = {}
        self.requests: list[Request] = []

    def read_bytes(self) -> int:
        """Of the folder, what this rank reads."""
        sizes = ((self._stored[name].size, self.parts.get(name, 1)) for name in self.wanted)
        return sum(size // parts for size, parts in sizes if parts)

    def missing(self) -> list[str]:
        """What was asked for and is not stored, with its shape."""
        absent = sorted(self.wanted.keys() - self._stored.keys())
        return [f"{name} {list(self.wanted[name].shape)}" for name in absent]

    def has(self, name: str) -> bool:
        return name in self._stored

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        found = PlainStorage(name, tuple(shape))
        self._record(shape, found.wanted())
        self._cut(found, cut)
        return self._plain(found, dtype, cut)

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        del below
        self._record(shape, {name: Wanted(tuple(shape), WHOLE)})
        return self._plain(PlainStorage(name, tuple(shape)), torch.int32, None)

    def matrix(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Matrix:
        found = self._find(name, shape, cut)
        self.requests.append(Request(found, self.dtype, cut))
        held = empty_matrix(found, self.dtype, self.device, cut)
        self.held[name] = held.storage
        return held

    def elsewhere(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._find(name, shape, None)
        self.parts |= dict.fromkeys(found.wanted(), 0)

    def fill(
        self, name: str, shape: tuple[int, ...], target: Matrix, cut: Cut | None = None
    ) -> None:
        own = empty_matrix(self._find(name, shape, cut), self.dtype, self.device, cut)
        if self.has(name) and own.storage != target.storage:
            raise UnsupportedModel(
                f"{self._place(name)}: stored as {self._stored[name].dtype}, and the first of the "
                f"experts with which it is joined as {target.storage}; they must be stored alike"
            )
        self.held[name] = own.storage

    def settle(self) -> None:
        """Nothing is read."""

    def dense(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        found = self._find(name, shape, cut)
        if isinstance(found, PlainStorage):
            return self._plain(found, dtype, cut)
        self.requests.append(Request(found, self.dtype, cut))
        return self._empty(PlainStorage(name, tuple(shape)), dtype, cut)

    def same(self, name: str, other: str) -> bool:
        del name, other
        return False  # contents are not read here

    def skip(self, pattern: str, reason: str) -> None:
        self.skipped[pattern] = reason

    def _find(self, name: str, shape: tuple[int, ...], cut: Cut | None) -> Storage:
        found = find_storage(self._stored, name, tuple(shape))
        self._record(shape, found.wanted())
        self._cut(found, cut)
        self.storages[name] = found
        return found

    def _cut(self, found: Storage, cut: Cut | None) -> None:
        """Note what is read of a tensor. Raises ConfigError if it cannot be cut so."""
        if cut is not None:
            check_cut(found, cut)
            self.parts |= dict.fromkeys(found.wanted(), cut.share.count)

    def _plain(self, found: PlainStorage, dtype: torch.dtype | None, cut: Cut | None) -> Tensor:
        self.requests.append(Request(found, dtype or self.dtype, cut))
        return self._empty(found, dtype, cut)

    def _empty(self, held: PlainStorage, dtype: torch.dtype | None, cut: Cut | None) -> Tensor:
        own = empty_matrix(held, dtype or self.dtype, self.device, cut)
        self.held[held.name] = own.storage
        return own.tensors()[0]

    def _record(self, shape: tuple[int, ...], wanted: dict[str, Wanted]) -> None:
        self.parameters += math.prod(shape)
        self.repeated.extend(wanted.keys() & self.wanted.keys())
        self.wanted |= wanted
        if len(self.wanted) > len(self._stored) + MOST_MISSING:
            raise CheckpointError(
                f"config.json: its num_hidden_layers and n_routed_experts ask for far more tensors "
                f"than the {len(self._stored)} that the folder holds"
            )

    def _place(self, name: str) -> str:
        found = self._stored.get(name)
        return name if found is None else f"{name} (in {found.file.name})"
