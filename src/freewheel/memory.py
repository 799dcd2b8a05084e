# SPDX-License-Identifier: Apache-2.0
"""How much state an engine holds, decided before any of it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from freewheel.config import Decisions, EngineConfig
from freewheel.errors import ConfigError
from freewheel.spec.cache import CacheGroup
from freewheel.spec.model import ModelSpec
from freewheel.spec.storage import Fp8IndexStorage, Fp8Storage, PlainStorage, RowStorage
from freewheel.spec.transfer import SlotPlan


@dataclass(frozen=True)
class Sizes:
    """Rows and pages of the device state, scratch row 0 and scratch page 0 included.

    `pages[g]`: pages of group g. `row_width`: tokens a row holds, which is the context limit: no
    token, draft or cache row past it could ever be used. `host_slots`: blocks that host memory
    holds besides.
    """

    rows: int
    row_width: int
    pages: tuple[int, ...]
    host_slots: int = 0


def plan_memory(
    config: EngineConfig, groups: tuple[CacheGroup, ...], model_limit: int, decisions: Decisions
) -> Sizes:
    """Rows for `max_batch` requests, and pages.

    A group that keeps all tokens gets pages for `max_batch` requests of full context, or its share
    of `cache_bytes` where that is less; one that keeps the latest alone gets what so many requests
    can ever hold at once, and what prompts found again need to start from (`resume_points`).
    Raises ConfigError if not even one full-context request fits.
    """
    context_len = config.context_len or model_limit
    if context_len > model_limit:
        raise ConfigError(
            f"context_len: {context_len} exceeds the model's own limit of {model_limit}"
        )
    wanted = tuple(pages_wanted(config, group, context_len) for group in groups)
    costs = tuple(n * group.page_bytes for n, group in zip(wanted, groups, strict=True))
    latest = sum(c for c, g in zip(costs, groups, strict=True) if g.retention is not None)
    if latest and latest >= config.cache_bytes:
        raise ConfigError(
            f"cache_bytes: {config.cache_bytes} does not hold the {latest} bytes of the groups "
            "that keep only the latest tokens; raise it, or lower chunk, max_batch or run_ahead"
        )
    cost = max(1, sum(costs) - latest)
    points = resume_points(config, groups, wanted, config.cache_bytes - latest)
    kept = sum(points * resume_pages(group) * group.page_bytes for group in groups)
    budget = min(config.cache_bytes - latest - kept, cost)
    pages = tuple(
        n * budget // cost if group.retention is None else n + points * resume_pages(group)
        for n, group in zip(wanted, groups, strict=True)
    )
    _check_one_fits(config, groups, pages, context_len)
    if budget < cost:
        share = budget / cost
        decisions.note(
            "pages", pages, f"cache_bytes holds {share:.0%} of {config.max_batch} full contexts"
        )
    else:
        decisions.note("pages", pages, f"{config.max_batch} requests of {context_len} tokens")
    slots = host_slots(config, groups, decisions)
    return Sizes(config.max_batch + 1, context_len, tuple(n + 1 for n in pages), slots)


def host_slots(config: EngineConfig, groups: tuple[CacheGroup, ...], decisions: Decisions) -> int:
    """Blocks that `host_cache_gb` of host memory hold. Raises ConfigError for less than one."""
    size = config.host_gigabytes
    if not size:
        return 0
    plan = SlotPlan.of(groups, math.lcm(*(group.page_size for group in groups)))
    slots = int(size * 1e9) // plan.bytes
    if not slots:
        raise ConfigError(
            f"host_cache_gb: {size} does not hold one block of {plan.bytes} bytes; "
            "raise it, or leave it out"
        )
    block = math.lcm(*(group.page_size for group in groups))
    decisions.note("host_cache_gb", f"{slots * block} tokens", f"blocks of {plan.bytes} bytes")
    return slots


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
    reason = "any size suits this model"
    if multiple > 1:
        reason = f"must be a multiple of {multiple} for this model"
    decisions.note("page_size", choice, reason)
    return choice


def pages_wanted(config: EngineConfig, group: CacheGroup, context_len: int) -> int:
    """The most pages of `group` that the requests of a full engine hold at once.

    With `run_ahead` rounds unread, what the latest tokens are is known that much later: up to so
    many rounds' tokens are kept besides them.
    """
    if group.retention is None:
        return config.max_batch * group.pages_for(context_len)
    rounds, ladder = config.run_ahead + 1, config.ladder()
    decode = ladder.decode[-1]
    decoding = pages_touched(group, rounds * decode.reach + ladder.lag)
    prompting = pages_touched(group, rounds * (config.chunk + decode.depth))
    largest = group.pages_for(context_len)
    return config.max_batch * min(decoding, largest) + config.prefill_batch * min(
        prompting, largest
    )


def resume_points(
    config: EngineConfig, groups: tuple[CacheGroup, ...], wanted: tuple[int, ...], budget: int
) -> int:
    """How many blocks of tokens can be started behind, if all groups together keep their pages.

    Every block of the history, if a fifth of `budget` bytes pays for the latest tokens at its end.
    """
    point = sum(resume_pages(group) * group.page_bytes for group in groups)
    if not config.prefix_cache or not point:
        return 0
    size = math.lcm(*(group.page_size for group in groups))
    tokens = [n * g.page_size for n, g in zip(wanted, groups, strict=True) if g.retention is None]
    return min(max(tokens, default=0) // size, budget // 5 // point)


def resume_pages(group: CacheGroup) -> int:
    """Pages of the latest tokens that a block keeps."""
    return -(-group.resume_tokens // group.page_size)


def request_pages(config: EngineConfig, group: CacheGroup, context_len: int) -> int:
    """Pages that one decoding request of full context holds, all its letters read."""
    if group.retention is None:
        return group.pages_for(context_len)
    ladder = config.ladder()
    touched = pages_touched(group, ladder.decode[-1].reach + ladder.lag)
    return min(group.pages_for(context_len), touched)


def pages_touched(group: CacheGroup, stretch: int) -> int:
    """Pages that hold a group's latest tokens and `stretch` more, wherever they begin."""
    assert group.retention is not None
    return (group.retention + stretch - 2) // group.page_size + 2


def _check_one_fits(
    config: EngineConfig, groups: tuple[CacheGroup, ...], pages: tuple[int, ...], context_len: int
) -> None:
    for group, count in zip(groups, pages, strict=True):
        needed = group.pages_for(context_len)
        if group.retention is None and count < needed:
            raise ConfigError(
                f"cache_bytes: {config.cache_bytes} leaves {count} pages of {group.name}, and one "
                f"request of {context_len} tokens takes {needed}; raise it or lower context_len"
            )


def resolve_storage(config: EngineConfig, dtype: str, decisions: Decisions) -> RowStorage:
    """How cached rows are stored: in the dtype computed in, unless the user says otherwise."""
    if config.kv_cache_dtype == "fp8":
        return Fp8Storage()
    if config.kv_cache_dtype == "fp8-index":
        return Fp8IndexStorage(PlainStorage(dtype))
    if config.kv_cache_dtype == "bf16":
        return PlainStorage("bfloat16")
    decisions.note(
        "kv_cache_dtype", dtype, "as computed: FP8 rows change some tokens; ask for them"
    )
    return PlainStorage(dtype)
