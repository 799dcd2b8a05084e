# SPDX-License-Identifier: Apache-2.0
"""One weight from one precision to another, and which weights a format concerns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freewheel import ops
from freewheel.errors import CheckpointError
from freewheel.models import Catalogue, ModelFolder, StoredTensor
from freewheel.models.reading import Mapping
from freewheel.models.storage import (
    BlockStorage,
    PackedStorage,
    PlainStorage,
    Storage,
    scale_names,
)
from freewheel.spec.compressed import V4

Tensors = dict[str, Tensor]
Encode = Callable[[str, Tensor], Tensors]
"""(name, float32 [..., N, K]) -> the tensors that store it."""

EXPERTS = ".experts."
KEPT = (".eh_proj.weight", ".compressor.wkv.weight", ".compressor.wgate.weight")
"""Projections that are left as they are: V3.2's and GLM's own, and those whose products V4 sums."""

E8M0 = torch.float8_e8m0fnu


@dataclass
class Requantiser:
    """`targets`: how each weight that is to change is encoded; all else is taken over as it is."""

    folder: ModelFolder
    storages: dict[str, Storage]
    targets: dict[str, Encode]
    scales: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Scales of weights that change vanish; new ones are written with their weights."""
        owned = {
            storage.scale
            for name, storage in self.storages.items()
            if name in self.targets and not isinstance(storage, PlainStorage)
        }
        self.scales = frozenset(owned)

    def convert(self, name: str, mapping: Mapping) -> Tensors:
        """What takes the place of stored tensor `name`: nothing, itself, or a weight anew."""
        if name in self.scales:
            return {}
        if name not in self.targets:
            return {name: _as_stored(self.folder.tensors[name], mapping)}
        try:
            return self.targets[name](name, self._numbers(name, mapping))
        except CheckpointError as error:
            file = self.folder.tensors[name].file.name
            raise CheckpointError(f"{name} (in {file}): {error}") from error

    def notes(self) -> tuple[str, ...]:
        """What there is to say of the result."""
        return (f"{len(self.targets)} weights converted",)

    def _numbers(self, name: str, mapping: Mapping) -> Tensor:
        """float32 [..., N, K]."""
        values = mapping.tensor(self.folder.tensors[name])
        match self.storages.get(name):
            case None | PlainStorage():
                return values.float()
            case BlockStorage() as found:
                scale = _factors(self.folder.tensors[found.scale], mapping)
                return ops.dequantise_blocks(values, scale)
            case PackedStorage() as found:
                powers = mapping.tensor(self.folder.tensors[found.scale]).view(torch.uint8)
                return ops.dequantise_mxfp4(values, powers)


def _as_stored(stored: StoredTensor, mapping: Mapping) -> Tensor:
    """The same bytes. Packed numbers are written as the field does, as signed bytes."""
    found = mapping.tensor(stored)
    return found.view(torch.int8) if stored.dtype in ("I8", "F4") else found


def _factors(stored: StoredTensor, mapping: Mapping) -> Tensor:
    """float32; a byte is a power of two."""
    found = mapping.tensor(stored)
    return (found.view(E8M0) if stored.dtype == "U8" else found).float()


def make_requantiser(folder: ModelFolder, catalogue: Catalogue, to: str) -> Requantiser:
    """What `to` asks of each weight: a key of `config.PRECISIONS`."""
    if to == "bf16":
        return Requantiser(folder, catalogue.storages, _halved(folder, catalogue))
    fp8 = _encode_powers if folder.spec.family == V4 else _encode_blocks
    targets: dict[str, Encode] = {}
    for name, storage in catalogue.storages.items():
        if catalogue.held[name] == "float32" or name.endswith(KEPT):
            continue  # it decides rather than transforms: rounding it changes what is picked
        packed = to == "mxfp4" and EXPERTS in name
        if not isinstance(storage, PackedStorage if packed else BlockStorage):
            targets[name] = _encode_packed if packed else fp8
    return Requantiser(folder, catalogue.storages, targets)


def _halved(folder: ModelFolder, catalogue: Catalogue) -> dict[str, Encode]:
    """Whatever is quantised or computed in the model's own dtype, in bfloat16 if it is not yet."""
    return {
        name: _encode_half
        for name, held in catalogue.held.items()
        if folder.tensors[name].dtype != "BF16"
        and (
            held == "bfloat16"
            or isinstance(catalogue.storages.get(name), BlockStorage | PackedStorage)
        )
    }


def _encode_half(name: str, values: Tensor) -> Tensors:
    return {name: values.to(torch.bfloat16)}


def _encode_blocks(name: str, values: Tensor) -> Tensors:
    numbers, scale = ops.quantise_blocks(values)
    return {name: numbers, scale_names(name)[0]: scale}


def _encode_powers(name: str, values: Tensor) -> Tensors:
    numbers, scale = ops.quantise_blocks(values, power_of_two=True)
    return {name: numbers, scale_names(name)[0]: scale.to(E8M0)}


def _encode_packed(name: str, values: Tensor) -> Tensors:
    packed, powers = ops.quantise_mxfp4(values)
    return {name: packed.view(torch.int8), scale_names(name)[0]: powers.view(E8M0)}
