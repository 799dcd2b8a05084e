# SPDX-License-Identifier: Apache-2.0
"""From one precision of weights to another: a folder in, another folder out, file by file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from freewheel.config import check_conversion
from freewheel.errors import CheckpointError, ConfigError
from freewheel.models import ModelFolder, StoredTensor, open_folder
from freewheel.models.folder import INDEX
from freewheel.models.load import Stock, has_mtp_weights, take_stock
from freewheel.models.manifest import MANIFEST, Progress, write_manifest
from freewheel.models.reading import Mapping as FileMapping
from freewheel.runtime.requantise import Requantiser, make_requantiser
from freewheel.spec.compressed import V4

LEFT_BEHIND = ("config.json", INDEX, MANIFEST)
"""Files that are written anew. Weights in other formats are not taken along either."""

FILE_MODE = 0o644
"""Weights are read by whoever may read the rest."""

PICKLED = (".bin", ".pt", ".pth", ".safetensors")


def convert(model: str, out: Path, to: str, progress: Progress | None = None) -> tuple[str, ...]:
    """Write the model's folder again with weights in `to` (fp8, mxfp4 or bf16), as the field does.

    The folder appears whole or not at all, and replaces nothing. One weight file at a time is in
    memory. `progress` is called with (bytes written, bytes read in all). Returns notes.

    Raises CheckpointError for a folder that holds no model or weights that cannot be converted;
    ConfigError for a precision that is not known or a place that is taken.
    """
    folder = open_folder(check_conversion(model, out, to))
    stock = take_stock(folder, torch.bfloat16, mtp=has_mtp_weights(folder))
    work = make_requantiser(folder, stock.catalogue, to)
    with _appearing(out) as part:
        weight_map = _write_weights(folder, work, part, progress)
        _write_json(part / "config.json", _new_config(folder, to))
        if len(set(weight_map.values())) > 1:
            size = sum(file.stat().st_size for file in part.glob("*.safetensors"))
            _write_json(part / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        _copy_others(folder.path, part)
        write_manifest(part)
        _check(part, stock)
    return work.notes()


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name in the end, or goes away."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    part.mkdir()
    try:
        yield part
        if out.exists() or out.is_symlink():
            raise ConfigError(
                f"out: {out} has come to be meanwhile; give a place that is not there"
            )
        part.rename(out)
    finally:
        if part.exists():
            shutil.rmtree(part)


def _write_weights(
    folder: ModelFolder, work: Requantiser, part: Path, progress: Progress | None
) -> dict[str, str]:
    """Every file of the folder again, under its name; returns the new index."""
    by_file: dict[Path, dict[str, StoredTensor]] = {}
    for name, stored in folder.tensors.items():
        by_file.setdefault(stored.file, {})[name] = stored
    total, done = sum(t.size for t in folder.tensors.values()), 0
    weight_map: dict[str, str] = {}
    mapping = FileMapping()
    for file, tensors in sorted(by_file.items()):
        made: dict[str, Tensor] = {}
        for name, stored in tensors.items():
            made |= work.convert(name, mapping)
            done += stored.size
            if progress is not None:
                progress(done, total)
        save_file(made, part / file.name, {"format": "pt"})
        (part / file.name).chmod(FILE_MODE)
        weight_map |= dict.fromkeys(made, file.name)
    mapping.close()
    return weight_map


def _new_config(folder: ModelFolder, to: str) -> dict[str, object]:
    """config.json, with what it says of weights made true."""
    config = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    given = config.pop("quantization_config", None) or {}
    config.pop("expert_dtype", None)
    if to == "bf16":
        for name in ("torch_dtype", "dtype"):
            if name in config:
                config[name] = "bfloat16"
        return config
    own: dict[str, object] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    stream = folder.spec.family == V4
    if stream or "scale_fmt" in given:
        own["scale_fmt"] = "ue8m0" if stream else given["scale_fmt"]
    if "modules_to_not_convert" in given:
        own["modules_to_not_convert"] = given["modules_to_not_convert"]
    if stream:
        config["expert_dtype"] = "fp4" if to == "mxfp4" else "fp8"
    elif to == "mxfp4":
        own["expert_dtype"] = "fp4"
    return config | {"quantization_config": own}


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _copy_others(source: Path, part: Path) -> None:
    """Tokenizer, generation defaults, licence and the like."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in LEFT_BEHIND and file.suffix not in PICKLED:
            shutil.copyfile(file, part / file.name)


def _check(part: Path, stock: Stock) -> None:
    """What was written is a model with as many numbers. Raises CheckpointError if it is not."""
    written = open_folder(part)
    found = take_stock(written, torch.bfloat16, mtp=stock.draft_head is not None)
    if found.catalogue.parameters != stock.catalogue.parameters:
        raise CheckpointError(
            f"{part}: holds {found.catalogue.parameters} numbers instead of "
            f"{stock.catalogue.parameters}"
        )
