# SPDX-License-Identifier: Apache-2.0
"""From a configuration to an executor: read the folder, plan memory, load, choose a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from freewheel.config import Decisions, EngineConfig, find_model
from freewheel.decode import ChainDrafter, Drafter, LookupDrafter, NoDrafter
from freewheel.errors import CheckpointError, ConfigError
from freewheel.models import ModelFolder, load_folder, open_folder
from freewheel.models.base import DraftHead
from freewheel.models.load import Stock, has_mtp_weights, take_stock
from freewheel.ops import load_kernels
from freewheel.runtime.executor import Executor
from freewheel.runtime.memory import Sizes, plan_memory
from freewheel.spec.cache import CacheGroup
from freewheel.spec.model import ModelSpec
from freewheel.spec.shape import ShapeLadder
from freewheel.state.pool import DTYPES


@dataclass(frozen=True)
class Resolved:
    """What the options that may be "auto" came to. `drafter` is "none" without drafts."""

    device: str
    graph: str
    dtype: str
    drafter: str


@dataclass(frozen=True)
class Built:
    """An executor, and what the host must know of it."""

    spec: ModelSpec
    ladder: ShapeLadder
    groups: tuple[CacheGroup, ...]
    sizes: Sizes
    executor: Executor
    decisions: Decisions
    notes: tuple[str, ...]
    resolved: Resolved


def build(
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
    *,
    tokenizer_size: int = 0,
) -> Built:
    """Load the model of `config` and make its executor. No graph is captured yet.

    `progress` is called with (bytes read, bytes in all). `tokenizer_size`: token ids that the
    folder's tokenizer may give. Raises CheckpointError or ConfigError before memory is taken for
    weights.
    """
    decisions = Decisions()
    folder = open_folder(find_model(config.model))
    if tokenizer_size > folder.spec.vocab_size:
        raise CheckpointError(
            f"tokenizer.json: knows ids up to {tokenizer_size - 1}, but the model has "
            f"{folder.spec.vocab_size} tokens; the folder mixes two models"
        )
    drafter = resolve_drafter(config, folder, decisions)
    device = resolve_device(config, decisions)
    graph = resolve_graph(config, device, decisions)
    dtype = resolve_dtype(config, device, decisions)
    page_size = resolve_page_size(config, folder.spec, decisions)
    groups = sketch(config, folder, drafter, dtype).model.cache_groups(page_size, dtype)
    sizes = plan_memory(config, groups, folder.spec.max_positions, decisions)
    torch.set_num_threads(config.threads)
    load_kernels(device)
    loaded = load_folder(
        folder,
        DTYPES[dtype],
        device=device,
        positions=sizes.row_width,
        mtp=drafter == "mtp",
        progress=progress,
    )
    ladder = config.ladder()
    executor = Executor(
        loaded.model,
        _make_drafter(drafter, loaded.draft_head),
        loaded.weights,
        groups,
        sizes,
        ladder.shapes(),
        device=device,
        graph=graph,
        run_ahead=config.run_ahead,
        guard=config.guard,
    )
    return Built(
        folder.spec,
        ladder,
        groups,
        sizes,
        executor,
        decisions,
        loaded.report.notes,
        Resolved(device, graph, dtype, drafter),
    )


def sketch(config: EngineConfig, folder: ModelFolder, drafter: str, dtype: str) -> Stock:
    """The model from headers alone. Raises CheckpointError if the folder does not hold it."""
    positions = config.context_len or folder.spec.max_positions
    return take_stock(folder, DTYPES[dtype], positions=positions, mtp=drafter == "mtp")


def resolve_drafter(config: EngineConfig, folder: ModelFolder, decisions: Decisions) -> str:
    """ "none", "mtp" or "lookup". Raises ConfigError if `mtp` is asked of a model without it."""
    if config.speculate == 0:
        return "none"
    has_mtp = folder.spec.mtp is not None
    if config.drafter == "auto":
        found = has_mtp and has_mtp_weights(folder)
        choice = "mtp" if found else "lookup"
        reason = "has a" if found else "has no"
        decisions.note("drafter", choice, f"the checkpoint {reason} multi-token-prediction layer")
        return choice
    if config.drafter == "mtp" and not has_mtp:
        raise ConfigError(
            'drafter: "mtp" needs a multi-token-prediction layer, which this model does not have; '
            'use drafter="lookup" or speculate=0'
        )
    return config.drafter


def resolve_device(config: EngineConfig, decisions: Decisions) -> str:
    """ "cpu" or "cuda". Raises ConfigError if a CUDA device is asked for and there is none."""
    found = torch.cuda.is_available()
    if config.device == "auto":
        choice = "cuda" if found else "cpu"
        decisions.note("device", choice, f"there is {'a' if found else 'no'} CUDA device")
        return choice
    if config.device == "cuda" and not found:
        raise ConfigError('device: "cuda", but PyTorch finds no CUDA device; use device="cpu"')
    return config.device


def resolve_graph(config: EngineConfig, device: str, decisions: Decisions) -> str:
    """ "eager", "tape" or "cuda". Raises ConfigError for a CUDA graph on another device."""
    if config.graph == "auto":
        choice = "cuda" if device == "cuda" else "tape"
        decisions.note("graph", choice, f"what {device} replays fastest")
        return choice
    if config.graph == "cuda" and device != "cuda":
        raise ConfigError(f'graph: "cuda" needs a CUDA device, and this is {device}; use "tape"')
    return config.graph


def resolve_dtype(config: EngineConfig, device: str, decisions: Decisions) -> str:
    """The dtype that the model is computed in: a key of `state.pool.DTYPES`."""
    if config.dtype != "auto":
        return config.dtype
    if device == "cuda":
        decisions.note("dtype", "bfloat16", "weights are stored so, and GPUs compute it fastest")
        return "bfloat16"
    decisions.note("dtype", "float32", "the CPU computes bfloat16 slower and rounds it by shape")
    return "float32"


def resolve_page_size(config: EngineConfig, spec: ModelSpec, decisions: Decisions) -> int:
    """Tokens of a cache page. Raises ConfigError for one that does not suit the model."""
    multiple = spec.page_multiple
    if config.page_size is not None:
        if config.page_size % multiple:
            raise ConfigError(
                f"page_size: must be a multiple of {multiple} for this model, whose cached rows "
                f"cover up to so many tokens; got {config.page_size}"
            )
        return config.page_size
    choice = next(size for size in (64, 256, multiple) if size % multiple == 0)
    decisions.note("page_size", choice, f"must be a multiple of {multiple} for this model")
    return choice


def _make_drafter(name: str, head: DraftHead | None) -> Drafter:
    if name == "none":
        return NoDrafter()
    if name == "lookup":
        return LookupDrafter()
    assert head is not None, "resolve_drafter chose mtp, so the head was loaded"
    return ChainDrafter(head)
