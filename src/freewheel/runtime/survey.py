# SPDX-License-Identifier: Apache-2.0
"""What an engine would be, read from headers alone: no weight is loaded, no state is made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from freewheel.config import Decisions, EngineConfig, find_model
from freewheel.memory import Sizes, plan_memory, request_pages
from freewheel.models import Catalogue, ModelFolder
from freewheel.models.manifest import Progress, verify_manifest
from freewheel.nn.source import held_tensors
from freewheel.runtime.build import (
    find_folder,
    note_kernels,
    plan_groups,
    resolve_device,
    resolve_drafter,
    resolve_dtype,
    resolve_graph,
    sketch,
)
from freewheel.spec.cache import CacheGroup
from freewheel.spec.model import ModelSpec
from freewheel.spec.options import Decision
from freewheel.spec.shape import ShapeLadder
from freewheel.state import Arena, CachePool, SequenceState


@dataclass(frozen=True)
class Precision:
    """Modules that are alike: `stored` is the dtype in their file, `held` what they run in.

    `modules`: names without layer and expert. `tensors`: how many there are.
    """

    stored: str
    held: str
    modules: tuple[str, ...]
    tensors: int


@dataclass(frozen=True)
class Survey:
    """`request_pages`: what a decoding request of full context holds of each group.

    `memory`: bytes by what they are for. `parameters`: elements of the weights asked for.
    `precisions`: what every module runs in."""

    spec: ModelSpec
    parameters: int
    dtype: str
    precisions: tuple[Precision, ...]
    groups: tuple[CacheGroup, ...]
    sizes: Sizes
    request_pages: tuple[int, ...]
    ladder: ShapeLadder
    memory: dict[str, int]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]


def survey(config: EngineConfig) -> Survey:
    """Read the folder of `config` and plan. Raises what `build` raises."""
    decisions = Decisions()
    folder = find_folder(config)
    drafter = resolve_drafter(config, folder, decisions)
    device = resolve_device(config, decisions)
    note_kernels(device, decisions)
    resolve_graph(config, device, decisions)
    dtype = resolve_dtype(config, device, decisions)
    config.check_deterministic(device)
    found = sketch(config, folder, drafter, dtype)
    groups = plan_groups(config, folder.spec, found.model, dtype, decisions)
    sizes = plan_memory(config, groups, folder.spec.max_positions, decisions)
    arena = Arena("meta")
    SequenceState.build(
        arena, sizes.rows, sizes.row_width, groups, folder.spec.vocab_size, config.max_grammars
    )
    CachePool(arena, groups, sizes.pages)
    weights = sum(t.numel() * t.element_size() for t in held_tensors(found.model, found.draft_head))
    return Survey(
        spec=folder.spec,
        parameters=found.catalogue.parameters,
        dtype=dtype,
        precisions=_precisions(folder, found.catalogue),
        groups=groups,
        sizes=sizes,
        request_pages=tuple(request_pages(config, g, sizes.row_width) for g in groups),
        ladder=config.ladder(),
        memory={"weights": weights, **arena.sizes()},
        decisions=tuple(decisions.made),
        notes=(*folder.notes, *found.notes),
    )


_PLACE = re.compile(r"^(model\.)?(layers|mtp)\.\d+\.|(?<=experts)\.\d+(?=\.)|\.weight$")
"""What tells apart tensors of one kind: their layer, their expert, and an ending that all have."""


def _precisions(folder: ModelFolder, catalogue: Catalogue) -> tuple[Precision, ...]:
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, held in catalogue.held.items():
        kinds.setdefault((folder.tensors[name].dtype, held), []).append(_PLACE.sub("", name))
    return tuple(
        Precision(stored, held, tuple(dict.fromkeys(names)), len(names))
        for (stored, held), names in sorted(kinds.items())
    )


def verify(model: str, progress: Progress | None = None) -> int:
    """How many files of the model's folder are as its SHA256SUMS says.

    `progress` is called with (bytes read, bytes in all). Raises CheckpointError if any differs.
    """
    return verify_manifest(find_model(model), progress)
