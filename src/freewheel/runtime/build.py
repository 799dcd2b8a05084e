# SPDX-License-Identifier: Apache-2.0
"""From a configuration to an executor: read the folder, plan memory, load, choose a drafter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from freewheel.config import (
    Decisions,
    EngineConfig,
    disk_cache_folder,
    find_model,
    kernel_cache_folder,
)
from freewheel.decode import ChainDrafter, Drafter, ForcedTarget, LookupDrafter, NoDrafter
from freewheel.errors import CheckpointError, ConfigError
from freewheel.host import DiskIndex, Shelf
from freewheel.memory import Sizes, plan_memory, resolve_page_size, resolve_storage
from freewheel.models import (
    LoadedModel,
    ModelFolder,
    load_dummy,
    load_folder,
    open_dummy,
    open_folder,
)
from freewheel.models.base import DraftHead, Model
from freewheel.models.load import Stock, has_mtp_weights, take_stock
from freewheel.ops import kernels_lack, load_kernels
from freewheel.runtime.describe import describe
from freewheel.runtime.executor import Executor
from freewheel.runtime.files import (
    FileStore,
    folder_of_rank,
    retire,
    tell_of_ranks_no_more,
)
from freewheel.runtime.identity import cache_identity
from freewheel.runtime.parallel import Alone, Channel, Follower, Peers, assemble
from freewheel.runtime.rehearsal import open_device
from freewheel.spec.cache import CacheGroup
from freewheel.spec.mesh import ALONE, Mesh
from freewheel.spec.model import ModelSpec
from freewheel.spec.shape import ECHOES, ShapeLadder
from freewheel.spec.transfer import SlotPlan
from freewheel.state.adjust import table_cells
from freewheel.state.letters import TABLE_WORDS
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
    max_grammars: int

    def shelf(self) -> Shelf:
        """Places for grammars' tables, all empty."""
        return Shelf(self.max_grammars, table_cells(self.spec.vocab_size), 2 * TABLE_WORDS)


def build(
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
    *,
    tokenizer_size: int = 0,
    ladder: ShapeLadder | None = None,
    mean: float | None = None,
    leader: Channel | None = None,
) -> Built:
    """Load the model of `config` and make its executor. No graph is captured yet.

    `progress` is called with (bytes read, bytes in all). `tokenizer_size`: token ids that the
    folder's tokenizer may give. `ladder`: the rectangles, if not those of `config`. `mean`: tokens
    that a round decides of a row, for a measurement, whatever the target says. `leader`: the way
    to rank 0, on the ranks that follow it. Raises CheckpointError or ConfigError before memory is
    taken for weights, and before other ranks are started; RankError if one of these is lost.
    """
    decisions = Decisions()
    folder = find_folder(config)
    _check_tokenizer(tokenizer_size, folder.spec)
    drafter = resolve_drafter(config, folder, decisions)
    device = open_device(resolve_device(config, decisions))
    graph = resolve_graph(config, device, decisions)
    dtype = resolve_dtype(config, device, decisions)
    config.check_deterministic(device)
    context = config.context_len or folder.spec.max_positions
    mesh = config.mesh(context, 0 if leader is None else leader.rank)
    found = sketch(config, folder, drafter, dtype, mesh)
    groups = plan_groups(config, folder.spec, found.model, dtype, decisions)
    sizes = plan_memory(config, groups, folder.spec.max_positions, decisions)
    torch.set_num_threads(config.threads)
    cache = str(kernel_cache_folder(config, decisions)) if device == "cuda" else None
    load_kernels(device, cache)
    note_kernels(device, decisions)
    ladder = ladder or config.ladder()
    files = open_files(config, folder, groups, (device, dtype, drafter), sizes, mesh, decisions)
    peers = _peers(config, device, ladder, mean, leader, mesh)
    loaded = _load(config, folder, device, dtype, sizes.row_width, drafter == "mtp", mesh, progress)
    executor = Executor(
        loaded.model if mean is None else ForcedTarget(loaded.model, mean),
        make_drafter(drafter, loaded.draft_head, ladder.lag, DTYPES[dtype]),
        loaded.weights,
        groups,
        sizes,
        ladder.shapes(ECHOES, guided=True),
        device=device,
        graph=graph,
        run_ahead=config.run_ahead,
        guard=config.guard,
        deterministic=config.deterministic,
        grammars=config.max_grammars,
        peers=peers,
        mesh=mesh,
        check_ranks=config.check_ranks,
        canary=config.watch,
        files=files,
    )
    resolved, notes = Resolved(device, graph, dtype, drafter), loaded.report.notes
    parts = (ladder, groups, sizes, executor, decisions, notes, resolved)
    return Built(folder.spec, *parts, config.max_grammars)


def open_files(
    config: EngineConfig,
    folder: ModelFolder,
    groups: tuple[CacheGroup, ...],
    choices: tuple[str, ...],
    sizes: Sizes,
    mesh: Mesh,
    decisions: Decisions,
) -> FileStore | None:
    """Where blocks go below host memory: a folder of each rank's own, if there are several.

    Raises ConfigError for less room than for one block, and for a folder that is not ours alone.
    """
    if not sizes.host_slots or not config.disk_cache_gb:
        return None
    size = SlotPlan.of(groups, math.lcm(*(group.page_size for group in groups))).bytes
    told = (*choices, config.deterministic, config.load_format)
    place = whole = disk_cache_folder(config, decisions)
    if not mesh.alone:
        told += (mesh.tp, mesh.dp, mesh.experts_whole)  # sums over ranks round by their number
        place = folder_of_rank(place, mesh.rank)
    if mesh.rank:
        retire(place)
    else:
        tell_of_ranks_no_more(whole, mesh.size)
    store = FileStore(place, cache_identity(folder.path, groups, told), size)
    if not disk_blocks(config, store):
        store.close()
        raise ConfigError(
            f"disk_cache_gb: {config.disk_cache_gb} does not hold one block of "
            f"{store.file_bytes} bytes; raise it, or leave it out"
        )
    return store


def disk_blocks(config: EngineConfig, store: FileStore) -> int:
    """Blocks that `disk_cache_gb` hold."""
    return int(config.disk_cache_gb * 1e9) // store.file_bytes


def disk_indexes(config: EngineConfig, executor: Executor) -> list[DiskIndex | None]:
    """What the host knows of the files, of each copy of the model. RankError if a rank is gone."""
    store = executor.mover.files
    if store is None:
        return [None] * config.dp
    blocks = disk_blocks(config, store)
    return [DiskIndex(blocks, store.secret, found) for found in executor.carrier.scan()]


def _check_tokenizer(size: int, spec: ModelSpec) -> None:
    if size > spec.vocab_size:
        raise CheckpointError(
            f"tokenizer.json: knows ids up to {size - 1}, but the model has {spec.vocab_size} "
            "tokens; the folder mixes two models"
        )


def find_folder(config: EngineConfig) -> ModelFolder:
    """What the model of `config` stores, or would. Raises CheckpointError if it is unusable."""
    path = find_model(config.model, config.load_format)
    return open_dummy(path) if config.load_format == "dummy" else open_folder(path)


def _peers(
    config: EngineConfig,
    device: str,
    ladder: ShapeLadder,
    mean: float | None,
    leader: Channel | None,
    mesh: Mesh,
) -> Peers:
    """The other ranks; on rank 0, told to build the same engine."""
    if leader is not None:
        leader.form(mesh.tp, mesh.dp)
        return Follower(leader)
    if mesh.alone:
        return Alone()
    return assemble(device, mesh.tp, mesh.dp).lead(describe(config, ladder, mean))


def _load(
    config: EngineConfig,
    folder: ModelFolder,
    device: str,
    dtype: str,
    positions: int,
    mtp: bool,
    mesh: Mesh,
    progress: Callable[[int, int], None] | None,
) -> LoadedModel:
    own = DTYPES[dtype]
    if config.load_format == "dummy":
        return load_dummy(folder, own, device=device, positions=positions, mtp=mtp, mesh=mesh)
    return load_folder(
        folder, own, device=device, positions=positions, mtp=mtp, progress=progress, mesh=mesh
    )


def sketch(
    config: EngineConfig, folder: ModelFolder, drafter: str, dtype: str, mesh: Mesh = ALONE
) -> Stock:
    """The model from headers alone, or a rank's share of it.

    Raises CheckpointError if the folder does not hold it, ConfigError if ranks cannot share it.
    """
    positions = config.context_len or folder.spec.max_positions
    return take_stock(folder, DTYPES[dtype], positions=positions, mtp=drafter == "mtp", mesh=mesh)


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


def note_kernels(device: str, decisions: Decisions) -> None:
    """Say what kernels for `device` are written in; nothing for a CPU."""
    if device == "cuda":
        load_kernels(device)
        missing = kernels_lack(device)
        value = "CUDA C++ and Triton" if missing is None else "Triton"
        decisions.note("kernels", value, missing or "NVRTC is here to compile CUDA C++")


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


def plan_groups(
    config: EngineConfig, spec: ModelSpec, model: Model, dtype: str, decisions: Decisions
) -> tuple[CacheGroup, ...]:
    """What `model` stores. Raises ConfigError for pages or rows that do not suit it."""
    page_size = resolve_page_size(config, spec, decisions)
    return model.cache_groups(page_size, dtype, resolve_storage(config, dtype, decisions))


def make_drafter(
    name: str, head: DraftHead | None, lag: int = 0, dtype: torch.dtype = torch.float32
) -> Drafter:
    """The drafter that `resolve_drafter` named. `lag`: the ladder's; `dtype`: of hidden states."""
    if name == "none":
        return NoDrafter()
    if name == "lookup":
        return LookupDrafter()
    assert head is not None, "resolve_drafter chose mtp, so the head was loaded"
    return ChainDrafter(head, lag, dtype)
