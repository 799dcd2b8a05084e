# SPDX-License-Identifier: Apache-2.0
"""How much state an engine holds, decided before any of it is made."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.config import Decisions, EngineConfig
from freewheel.errors import ConfigError
from freewheel.spec.cache import CacheGroup


@dataclass(frozen=True)
class Sizes:
    """Rows and pages of the device state, scratch row 0 and scratch page 0 included.

    `pages[g]`: pages of group g. `row_width`: tokens a row holds, which is the context limit: no
    token, draft or cache row past it could ever be used.
    """

    rows: int
    row_width: int
    pages: tuple[int, ...]


def plan_memory(
    config: EngineConfig, groups: tuple[CacheGroup, ...], model_limit: int, decisions: Decisions
) -> Sizes:
    """Rows for `max_batch` requests, and pages.

    Every group gets pages for `max_batch` requests of full context, or its share of `cache_bytes`
    where that is less. Raises ConfigError if not even one full-context request fits.
    """
    context_len = config.context_len or model_limit
    if context_len > model_limit:
        raise ConfigError(
            f"context_len: {context_len} exceeds the model's own limit of {model_limit}"
        )
    wanted = tuple(config.max_batch * group.pages_for(context_len) for group in groups)
    cost = sum(n * group.page_bytes for n, group in zip(wanted, groups, strict=True))
    budget = min(config.cache_bytes, cost)
    pages = tuple(n * budget // cost for n in wanted)
    for group, count in zip(groups, pages, strict=True):
        needed = group.pages_for(context_len)
        if count < needed:
            raise ConfigError(
                f"cache_bytes: {config.cache_bytes} leaves {count} pages of {group.name}, and one "
                f"request of {context_len} tokens takes {needed}; raise it or lower context_len"
            )
    if budget < cost:
        share = budget / cost
        decisions.note(
            "pages", pages, f"cache_bytes holds {share:.0%} of {config.max_batch} full contexts"
        )
    else:
        decisions.note("pages", pages, f"{config.max_batch} requests of {context_len} tokens")
    return Sizes(config.max_batch + 1, context_len, tuple(n + 1 for n in pages))
