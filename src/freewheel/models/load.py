# SPDX-License-Identifier: Apache-2.0
"""From a folder to a model in memory: check everything first, then read each tensor once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.models.accounting import check_tensors
from freewheel.models.base import DraftHead, Model
from freewheel.models.catalogue import Catalogue
from freewheel.models.deepseek_v4 import load_deepseek_v4
from freewheel.models.deepseek_v32 import load_deepseek_v32
from freewheel.models.dummy import DummySource
from freewheel.models.folder import ModelFolder, read_spec, shorten
from freewheel.models.glm5 import load_glm5
from freewheel.models.quantised import compare_with_config
from freewheel.models.weights import Progress, SafetensorsSource
from freewheel.nn import WeightSource, held_tensors
from freewheel.spec.mesh import ALONE, Mesh
from freewheel.spec.model import ModelSpec

Loader = Callable[[Any, WeightSource, int, bool], tuple[Model, DraftHead | None]]
"""Takes the kind of spec that its family has."""

LOADERS: dict[str, Loader] = {
    "deepseek_v32": load_deepseek_v32,
    "deepseek_v4": load_deepseek_v4,
    "glm_moe_dsa": load_glm5,
}
"""`model_type` of config.json -> what builds that family."""


@dataclass(frozen=True)
class LoadReport:
    """`read_bytes`: stored bytes read. `notes`: what was skipped or passed over, and why."""

    read_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `weights`: every tensor it holds, for the arena of static tensors."""

    spec: ModelSpec
    model: Model
    draft_head: DraftHead | None
    weights: tuple[Tensor, ...]  # float [...] each
    report: LoadReport


def load_model(
    spec: ModelSpec, source: WeightSource, *, positions: int | None = None, mtp: bool = True
) -> tuple[Model, DraftHead | None]:
    """Build the family that `spec` names, asking `source` for every tensor.

    `positions`: how many positions a row may have, headroom for drafts included; None takes the
    model's own limit. `mtp`: build the draft head too, if the spec has one.
    """
    if spec.family not in LOADERS:
        raise UnsupportedModel(f"model_type {spec.family!r} has no implementation here")
    source.skip("*.rotary_emb.inv_freq", "recomputed from config.json")
    with_mtp = mtp and spec.mtp is not None
    if spec.mtp is not None and not with_mtp:
        for prefix in spec.mtp_prefixes:
            source.skip(f"{prefix}*", "the multi-token-prediction layer is off")
    return LOADERS[spec.family](spec, source, positions or spec.max_positions, with_mtp)


def load_folder(
    folder: ModelFolder,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    positions: int | None = None,
    mtp: bool = True,
    progress: Progress | None = None,
    mesh: Mesh = ALONE,
) -> LoadedModel:
    """Check the folder's headers against the model, then load it.

    `mtp`: whether the draft head is wanted. Wanted and promised by config.json, but incomplete, is
    an error; without it, such a folder loads. `progress` is called with (bytes read, bytes in all)
    after each tensor. `mesh`: the ranks that share the model; this one reads its part alone.
    Raises CheckpointError before memory is taken for weights.
    """
    _check_dtype(dtype)
    stock = take_stock(folder, dtype, positions=positions, mtp=mtp, mesh=mesh)
    catalogue = stock.catalogue
    total = catalogue.read_bytes()
    requests = catalogue.requests
    with SafetensorsSource(
        folder.tensors, dtype, device, progress, total, mesh, requests
    ) as source:
        model, head = load_model(folder.spec, source, positions=positions, mtp=mtp)
        shared = {name: why for name, why in source.skipped.items() if name in catalogue.wanted}
    notes = (
        *folder.notes,
        *stock.notes,
        *(f"skipped {name}: {why}" for name, why in shared.items()),
    )
    report = LoadReport(total, notes)
    return LoadedModel(folder.spec, model, head, held_tensors(model, head), report)


@dataclass(frozen=True)
class Stock:
    """A model without memory, what it asked for, and what there is to say of it."""

    model: Model
    draft_head: DraftHead | None
    catalogue: Catalogue
    notes: tuple[str, ...]


def take_stock(
    folder: ModelFolder,
    dtype: torch.dtype,
    *,
    positions: int | None = None,
    mtp: bool = True,
    mesh: Mesh = ALONE,
) -> Stock:
    """Build the model from headers alone, and account for every tensor of the folder.

    Raises CheckpointError if the folder does not hold the model; UnsupportedModel if it holds it in
    a way that nothing here computes with; ConfigError if the ranks of `mesh` cannot share it.
    """
    catalogue = Catalogue(folder.tensors, dtype, mesh)
    try:
        model, head = load_model(folder.spec, catalogue, positions=positions, mtp=mtp)
    except UnsupportedModel as error:
        if missing := catalogue.missing():  # what is not there is not stored in an odd way
            count = f"{len(missing)} tensors missing: {shorten(missing)}"
            raise CheckpointError(f"{folder.path}: {count}") from error
        raise
    notes = check_tensors(folder, catalogue, mtp and folder.spec.mtp is not None)
    notes = (*notes, *compare_with_config(folder, catalogue))
    return Stock(model, head, catalogue, notes)


def open_dummy(path: Path) -> ModelFolder:
    """A folder, or a config.json by itself, as if it stored what its model asks for.

    Raises CheckpointError if the configuration cannot be read.
    """
    config = path if path.is_file() else path / "config.json"
    spec = read_spec(config)
    source = DummySource(torch.bfloat16, "meta")
    load_model(spec, source)
    note = f"weights are random: {config.name} alone was read"
    return ModelFolder(config.parent, spec, source.wanted, (*spec.notes, note))


def load_dummy(
    folder: ModelFolder,
    dtype: torch.dtype,
    *,
    device: str,
    positions: int,
    mtp: bool,
    mesh: Mesh = ALONE,
) -> LoadedModel:
    """The model of a folder from `open_dummy`, with random weights made on `device`."""
    _check_dtype(dtype)
    source = DummySource(dtype, device, mesh)
    model, head = load_model(folder.spec, source, positions=positions, mtp=mtp)
    report = LoadReport(0, folder.notes)
    return LoadedModel(folder.spec, model, head, held_tensors(model, head), report)


def has_mtp_weights(folder: ModelFolder) -> bool:
    """Whether the folder stores any tensor of the layer that config.json promises."""
    spec = folder.spec
    if spec.mtp is None:
        return False
    return any(name.startswith(spec.mtp_prefixes) for name in folder.tensors)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise CheckpointError(f"dtype: must be bfloat16, float32 or float64, got {dtype}")
