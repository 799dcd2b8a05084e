# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face folder up to the headers of its weight files: no tensor is read here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor, read_header
from freewheel.spec.model import ModelSpec
from freewheel.spec.model_config import read_model_spec

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds. `tensors`: by name, each in the one file it is read from.

    `notes`: sentences about what was found and passed over.
    """

    path: Path
    spec: ModelSpec
    tensors: Mapping[str, StoredTensor]
    notes: tuple[str, ...]


def open_folder(path: str | Path) -> ModelFolder:
    """Read config.json, generation_config.json if there is one, and all headers.

    The index, if there is one, decides per tensor which file counts. Raises CheckpointError,
    naming the file, for anything missing, truncated or contradictory.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    spec = read_spec(folder / "config.json")
    index = folder / INDEX
    tensors, notes = _read_indexed(folder, index) if _exists(index) else _read_all(folder)
    return ModelFolder(folder, spec, tensors, (*spec.notes, *notes))


def read_spec(config: Path) -> ModelSpec:
    """The model of a config.json, and of the generation_config.json beside it if there is one.

    Raises CheckpointError, naming the file.
    """
    beside = config.parent / "generation_config.json"
    return read_model_spec(_read_json(config), _read_json(beside) if _exists(beside) else None)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = file.read_bytes() if file.is_file() else None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if raw is None:
        raise CheckpointError(f"{file}: the file is missing")
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also a number too long, brackets too deep
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return value


def _exists(file: Path) -> bool:
    """Whether there is an optional file. A link that leads nowhere is not an absent one."""
    return file.exists() or file.is_symlink()


def _read_indexed(folder: Path, index: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The tensors that the index lists, each from the file it names."""
    assigned = _weight_map(index)
    files = sorted(set(assigned.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.name} names files that are missing from {folder}: {', '.join(missing)}"
        )
    headers = {name: read_header(folder / name) for name in files}
    absent = [f"{t} (in {f})" for t, f in sorted(assigned.items()) if t not in headers[f]]
    if absent:
        raise CheckpointError(
            f"{index.name} lists tensors that their files do not hold: {shorten(absent)}"
        )
    unlisted = sorted({t for h in headers.values() for t in h} - assigned.keys())
    if unlisted:
        raise CheckpointError(
            f"{folder}: the weight files hold tensors that {index.name} does not list, so it "
            f"belongs to other files: {shorten(unlisted)}"
        )
    tensors = {tensor: headers[file][tensor] for tensor, file in assigned.items()}
    strays = [f"{t} in {f}" for f, h in headers.items() for t in h if assigned[t] != f]
    unread = sorted(f.name for f in folder.glob("*.safetensors") if f.name not in headers)
    notes: list[str] = []
    if strays:
        notes.append(f"copies that {INDEX} does not point to were ignored: {shorten(strays)}")
    if unread:
        notes.append(f"files that {INDEX} does not name were ignored: {shorten(unread)}")
    return tensors, tuple(notes)


def _weight_map(index: Path) -> dict[str, str]:
    assigned = _read_json(index).get("weight_map")
    if not isinstance(assigned, dict) or not assigned:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for tensor, file in assigned.items():
        if not isinstance(file, str) or not _is_file_name(file):
            raise CheckpointError(f"{index}: {tensor} is in {file!r}, which is not a file name")
    return assigned


def _is_file_name(name: str) -> bool:
    """A name that leads to no other folder, and that a file system can hold."""
    encoded = name.encode(errors="replace")
    return (
        Path(name).name == name not in ("", "..") and len(encoded) <= 255 and b"\0" not in encoded
    )


def _read_all(folder: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Every tensor of every safetensors file; without an index no name may occur twice."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(f.name for f in [*folder.glob("*.bin"), *folder.glob("*.pt")])
        hint = f"; {shorten(pickled)} is not safetensors and is never read" if pickled else ""
        raise CheckpointError(f"{folder}: no *.safetensors file{hint}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is in both {tensors[name].file.name} and {file.name}, and there is no "
                    f"{INDEX} to say which counts"
                )
            tensors[name] = stored
    return tensors, ()


def shorten(names: list[str], most: int = 6) -> str:
    """The first `most` names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
