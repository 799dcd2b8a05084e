# SPDX-License-Identifier: Apache-2.0
"""What is simulated: a model's cache groups, an engine's options, a machine's times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from freewheel.config import Decisions, EngineConfig, find_model
from freewheel.errors import CheckpointError, ConfigError
from freewheel.host import Scheduler
from freewheel.memory import pages_wanted, plan_memory, resolve_page_size, resolve_storage
from freewheel.simulate.costs import RoundCost
from freewheel.simulate.trace import Trace
from freewheel.spec import CacheGroup, DsaSpec, ModelSpec, read_model_spec
from freewheel.spec.compressed import CompressedSpec
from freewheel.spec.entry_groups import entry_groups
from freewheel.spec.history import history_group
from freewheel.spec.storage import RowStorage

UNLIMITED = 0
"""As many pages as a trace could ever fill: nothing that was kept has to go."""


DEFAULT_BYTES = 1 << 30
DEFAULT_CONTEXTS = 4


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """An engine to be, on a machine to be.

    `pages[g]` counts scratch page 0. `acceptance[i]`: see `StubDevice`; the number of drafts is
    `config.speculate`, and shares of more are not looked at. Raises ConfigError for an acceptance
    that cannot be, or has shares of fewer.
    """

    config: EngineConfig
    groups: tuple[CacheGroup, ...]
    pages: tuple[int, ...]
    context_len: int
    acceptance: tuple[float, ...]
    cost: RoundCost
    seed: int = 0

    def __post_init__(self) -> None:
        if self.config.depths:
            raise ConfigError("speculate: auto needs the times of real rounds; give a number")
        given, drafts = self.acceptance, self.config.depth
        if len(given) < drafts:
            raise ConfigError(f"accept: {len(given)} given for {drafts} drafts a round")
        falling = all(a >= b for a, b in pairwise(given))
        if not all(0 <= one <= 1 for one in given) or not falling:
            raise ConfigError(
                f"accept: must be shares from 0 to 1, none above the one before it, got {given}"
            )

    def scheduler(self, kind: type[Scheduler] = Scheduler) -> Scheduler:
        """The engine's own."""
        config = self.config
        return kind(
            config.ladder(),
            self.groups,
            self.pages,
            config.max_batch + 1,
            self.context_len,
            self.context_len,
            config.run_ahead,
            prefix_cache=config.prefix_cache,
            prefill_share=config.prefill_share,
        )


def simulation(
    config: EngineConfig,
    trace: Trace,
    acceptance: Sequence[float],
    cost: RoundCost,
    pages: int | None = None,
    seed: int = 0,
) -> Simulation:
    """What `config` makes of its model, read from config.json alone.

    `pages`: of every group that keeps all tokens, instead of what `config.cache_bytes` holds
    (the others get what they can ever need); UNLIMITED: of every group whatever `trace` could fill.
    Raises CheckpointError or ConfigError.
    """
    groups, context_len = _groups(config, trace)
    roomy = replace(config, context_len=context_len)
    if pages is None:
        found = plan_memory(roomy, groups, context_len, Decisions()).pages
    elif pages == UNLIMITED:
        found = tuple(_all_pages(config, trace, group) for group in groups)
    else:
        wide = replace(roomy, cache_bytes=1 << 50)
        latest = plan_memory(wide, groups, context_len, Decisions()).pages
        found = tuple(
            1 + pages if group.retention is None else count
            for group, count in zip(groups, latest, strict=True)
        )
    return Simulation(
        config=roomy,
        groups=groups,
        pages=found,
        context_len=context_len,
        acceptance=tuple(acceptance),
        cost=cost,
        seed=seed,
    )


def default_cache(config: EngineConfig, trace: Trace) -> int:
    """Bytes for a cache that nobody gave: DEFAULT_BYTES, or what DEFAULT_CONTEXTS requests of full
    context take where the model makes that more, and what all rows keep of their latest tokens.

    Raises CheckpointError or ConfigError.
    """
    groups, context_len = _groups(config, trace)
    needed = 0
    for group in groups:
        full = group.retention is None
        pages = DEFAULT_CONTEXTS * group.pages_for(context_len) if full else 0
        needed += group.page_bytes * (pages or pages_wanted(config, group, context_len))
    return max(DEFAULT_BYTES, needed)


def _groups(config: EngineConfig, trace: Trace) -> tuple[tuple[CacheGroup, ...], int]:
    """The model's, and the tokens of a full context."""
    spec = model_spec(config)
    longest = max(call.prompt + call.answer for call in trace.calls) + 1
    context_len = config.context_len or max(spec.max_positions, longest)
    page_size = resolve_page_size(config, spec, Decisions())
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    storage = resolve_storage(config, dtype, Decisions())
    wide = "float64" if dtype == "float64" else "float32"
    mtp = spec.mtp is not None and config.depth > 0
    return cache_groups(spec, page_size, wide, storage, mtp), context_len


def cache_groups(
    spec: ModelSpec, page_size: int, wide: str, storage: RowStorage, mtp: bool
) -> tuple[CacheGroup, ...]:
    """The groups that a model of this kind has. Raises UnsupportedModel for no such kind."""
    if isinstance(spec, CompressedSpec):
        return entry_groups(spec, page_size, wide, storage, mtp)
    assert isinstance(spec, DsaSpec), "read_model_spec knows these two kinds"
    return (history_group(spec, page_size, storage, mtp),)


def model_spec(config: EngineConfig) -> ModelSpec:
    """The model of a folder, of a config.json, or of a shipped name; no weight is looked at."""
    path = find_model(config.model, "dummy")
    file = path / "config.json" if path.is_dir() else path
    beside = file.parent / "generation_config.json"
    return read_model_spec(_json(file), _json(beside) if beside.is_file() else None)


def _json(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return found


def _all_pages(config: EngineConfig, trace: Trace, group: CacheGroup) -> int:
    """A page for every stretch of every call, and what rounds in flight reach beyond."""
    reach = (config.run_ahead + 2) * config.ladder().reach + (group.retention or 0)
    tokens = (call.prompt + call.answer + reach for call in trace.calls)
    return 2 + sum(2 + group.pages_for(count) for count in tokens)
