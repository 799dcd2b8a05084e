# SPDX-License-Identifier: Apache-2.0
"""Strict accounting: every tensor that a model needs is stored as needed, none is left over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.models.catalogue import Catalogue
from freewheel.models.folder import ModelFolder, shorten
from freewheel.models.header import StoredTensor
from freewheel.models.storage import Wanted


def check_tensors(folder: ModelFolder, wanted: Catalogue, mtp: bool) -> tuple[str, ...]:
    """Compare what `wanted` recorded with the folder's headers; returns a note per skipped group.

    Raises CheckpointError naming every kind of difference and the tensors and files concerned;
    UnsupportedModel if all that is missing is an indexer of the multi-token-prediction layer.
    """
    skipped = _group_skipped(folder.tensors.keys() - wanted.wanted.keys(), wanted.skipped)
    surplus = sorted(
        folder.tensors.keys()
        - wanted.wanted.keys()
        - {n for names in skipped.values() for n in names}
    )
    missing = sorted(wanted.wanted.keys() - folder.tensors.keys())
    _refuse_mtp_without_indexer(folder, missing, mtp)
    found = {n: (folder.tensors[n], s) for n, s in wanted.wanted.items() if n in folder.tensors}
    complaints = [
        *_complain("missing", wanted.missing()),
        *_complain("not part of the model", [_place(folder.tensors, n) for n in surplus]),
        *_complain("of another shape", _wrong_shapes(found)),
        *_complain("of an unsupported dtype", _wrong_dtypes(found)),
    ]
    if complaints:
        hint = _hint(folder, [*missing, *surplus], mtp)
        raise CheckpointError(f"{folder.path}: " + "; ".join(complaints) + hint)
    return tuple(f"skipped {shorten(names)}: {why}" for why, names in skipped.items())


def _group_skipped(names: Iterable[str], rules: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> stored names that some rule lets pass."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        reason = next((why for rule, why in rules.items() if fnmatchcase(name, rule)), None)
        if reason is not None:
            groups.setdefault(reason, []).append(name)
    return groups


def _complain(kind: str, items: list[str]) -> list[str]:
    return [f"{len(items)} tensors {kind}: {shorten(items)}"] if items else []


def _place(tensors: Mapping[str, StoredTensor], name: str) -> str:
    return f"{name} (in {tensors[name].file.name})"


Found = Mapping[str, tuple[StoredTensor, Wanted]]


def _wrong_shapes(found: Found) -> list[str]:
    return [
        f"{name} (in {stored.file.name}): expected {list(wanted.shape)}, found {list(stored.shape)}"
        for name, (stored, wanted) in sorted(found.items())
        if stored.shape != wanted.shape
    ]


def _wrong_dtypes(found: Found) -> list[str]:
    return [
        f"{name} (in {stored.file.name}): expected one of {', '.join(wanted.dtypes)}, found "
        f"{stored.dtype}"
        for name, (stored, wanted) in sorted(found.items())
        if stored.dtype not in wanted.dtypes
    ]


def _mtp_prefix(folder: ModelFolder) -> str:
    return folder.spec.mtp_prefix


def _refuse_mtp_without_indexer(folder: ModelFolder, missing: list[str], mtp: bool) -> None:
    indexer = f"{_mtp_prefix(folder)}self_attn.indexer."
    if mtp and missing and all(name.startswith(indexer) for name in missing):
        raise UnsupportedModel(
            f"{folder.path}: the multi-token-prediction layer has no indexer of its own, and the "
            f"target's picks would not be right for it; missing: {shorten(missing)}. Load the "
            "model without it"
        )


def _hint(folder: ModelFolder, names: list[str], mtp: bool) -> str:
    inside = [name for name in names if name.startswith(folder.spec.mtp_prefixes)]
    if not names or len(inside) < len(names):
        return ""
    if mtp:
        return (
            ". All of them belong to the multi-token-prediction layer, which is incomplete or of "
            "another kind. Load the model without it"
        )
    return ". num_nextn_predict_layers in config.json does not announce this layer"
