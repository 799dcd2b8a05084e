# SPDX-License-Identifier: Apache-2.0
"""Where config.json and the headers tell different tales of quantised weights: headers count."""

from __future__ import annotations

from collections.abc import Iterator

from freewheel.models.catalogue import Catalogue
from freewheel.models.folder import ModelFolder, shorten
from freewheel.models.storage import BlockStorage, PackedStorage

EXPERTS = ".experts."


def compare_with_config(folder: ModelFolder, wanted: Catalogue) -> tuple[str, ...]:
    """Sentences about what is stored otherwise than `quantization_config` says."""
    return tuple(_differences(folder, wanted))


def _differences(folder: ModelFolder, wanted: Catalogue) -> Iterator[str]:
    said = folder.spec.quantization
    found = wanted.storages
    quantised = [n for n, s in found.items() if isinstance(s, BlockStorage | PackedStorage)]
    if said is None:
        if quantised:
            yield (
                f"config.json has no quantization_config, but {len(quantised)} weights are stored "
                f"quantised, and run so: {shorten(quantised, 2)}"
            )
        return
    if not quantised:
        yield "quantization_config announces quantised weights, but none is stored so"
    excluded = [name for name in quantised if said.excludes(name.rpartition(".")[0])]
    if excluded:
        yield (
            "quantization_config excludes modules that are stored quantised, and run so: "
            f"{shorten(excluded, 2)}"
        )
    packed = any(isinstance(s, PackedStorage) for n, s in found.items() if EXPERTS in n)
    if said.expert_dtype is not None and packed != (said.expert_dtype == "fp4"):
        stored = "mxfp4" if packed else "no mxfp4"
        yield f"expert_dtype is {said.expert_dtype!r}, but experts are stored as {stored}"
