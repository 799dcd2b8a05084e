# SPDX-License-Identifier: Apache-2.0
"""Answers from kept pages are the answers, and drafts fare as well behind them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from freewheel import SamplingParams
from freewheel.errors import ConfigError, RequestError
from tests.program.whitebox import PoisonedEngine, engine, prompts, watch_requests

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize("family", ["t32", "tg", "t4"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_kept_prompt_changes_neither_tokens_nor_accepted_drafts(
    folders: dict[str, Path], family: str, params: SamplingParams
) -> None:
    """Turn after turn of a conversation, on one engine and on cold ones."""
    options: dict[str, Any] = {"context_len": 128}
    warm = engine(folders[family], **options)
    cold = engine(folders[family], prefix_cache=False, **options)
    whole = 0
    turn = random.Random(3).choices(range(256), k=40)
    for extra in prompts(4, count=4, longest=8):
        (kept,), (anew,) = warm.generate([turn], params), cold.generate([turn], params)
        assert kept.token_ids == anew.token_ids
        assert kept.metrics.accepted == anew.metrics.accepted
        assert kept.metrics.rounds == anew.metrics.rounds
        assert anew.metrics.cached_tokens == 0
        block = max(group.page_size for group in warm.built.groups)
        assert kept.metrics.cached_tokens == whole // block * block
        whole = len(turn) + len(kept.token_ids) - 1  # computed, with the token behind it known
        turn = [*turn, *kept.token_ids, *extra]


@pytest.mark.parametrize("family", ["t32", "tg"])
@pytest.mark.parametrize("options", [{}, {"speculate": 2, "run_ahead": 0}], ids=str)
def test_a_prompt_that_ends_with_a_block_computes_one_token_and_leaves_others_theirs(
    folders: dict[str, Path], family: str, options: dict[str, Any]
) -> None:
    """The drafter's row at its end has read another token than the one that stands there."""
    given: dict[str, Any] = {"context_len": 96, "canary": "all"} | options
    warm = engine(folders[family], **given)
    cold = engine(folders[family], prefix_cache=False, max_batch=1, prefill_batch=1, **given)
    prompt = random.Random(6).choices(range(256), k=40)
    (longer,) = warm.generate([prompt], GREEDY)
    ends = [prompt, prompt[:32], prompt[:16]]
    for params in (GREEDY, SEEDED):
        for kept, end in zip(warm.generate(ends, params), ends, strict=True):
            (anew,) = cold.generate([end], params)
            assert kept.token_ids == anew.token_ids
            assert kept.metrics.accepted == anew.metrics.accepted
            assert kept.metrics.cached_tokens == len(end) - 1
    (again,) = warm.generate([[*prompt, *longer.token_ids]], GREEDY)
    (anew,) = cold.generate([[*prompt, *longer.token_ids]], GREEDY)
    assert again.token_ids == anew.token_ids
    assert again.metrics.accepted == anew.metrics.accepted
    assert not warm.alarm.counts


def test_a_damaged_page_is_found_in_its_copy_and_neither_is_used_again(
    folders: dict[str, Path],
) -> None:
    llm = engine(folders["t32"], context_len=96, canary="all")
    prompt = random.Random(6).choices(range(256), k=40)
    (first,) = llm.generate([prompt], GREEDY)
    prefix = llm._session.scheduler.copies[0].roster.reservations.prefix
    pools = llm._session.scheduler.copies[0].roster.reservations.pools
    assert prefix is not None
    request = watch_requests(llm)
    source = list(prefix.blocks())[9]
    llm.executor.cache.stored("history")[0][:, source.pages[0][0], 1] += 1
    (again,) = llm.generate([prompt], GREEDY)
    assert again.token_ids == first.token_ids
    assert request[0].stats.violations == 1 and pools[0].condemned == 2


@pytest.mark.parametrize("family", ["t32", "t4"])
def test_shared_pages_hold_what_a_one_shot_prefill_writes(
    folders: dict[str, Path], family: str
) -> None:
    """Everything but kept pages and live rows is NaN before each round."""
    llm = engine(folders[family], max_batch=3, context_len=128, graph="tape")
    watched = PoisonedEngine(llm, seed=9, chance=0.15)
    base = random.Random(8).choices(range(256), k=40)
    batch = [base + tail for tail in prompts(5, count=5, longest=12)]
    first = llm.generate(batch, GREEDY)
    second = llm.generate([*batch, [*batch[0], *first[0].token_ids]], GREEDY)
    assert [one.token_ids for one in second[:5]] == [one.token_ids for one in first]
    assert all(one.metrics.cached_tokens for one in second)
    assert watched.checked >= 5


def test_a_lookup_drafter_finds_runs_in_a_prompt_that_was_not_computed(
    folders: dict[str, Path],
) -> None:
    options: dict[str, Any] = {"drafter": "lookup", "context_len": 128}
    warm, cold = (engine(folders["t32"], **options) for _ in range(2))
    prompt = [3, 1, 4, *range(50, 70), *range(50, 70), *range(50, 70)]
    warm.generate([prompt], GREEDY)
    (again,), (first,) = warm.generate([prompt], GREEDY), cold.generate([prompt], GREEDY)
    assert again.metrics.cached_tokens >= 56
    assert again.token_ids == first.token_ids
    assert (again.metrics.drafted, again.metrics.accepted) == (
        first.metrics.drafted,
        first.metrics.accepted,
    )


def test_a_salt_keeps_tenants_apart(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], context_len=96)
    prompt = list(range(40))
    llm.generate([prompt], GREEDY, cache_salt="one")
    (other,) = llm.generate([prompt], GREEDY, cache_salt="other")
    (same,) = llm.generate([prompt], GREEDY, cache_salt="one")
    assert (other.metrics.cached_tokens, same.metrics.cached_tokens) == (0, 39)
    with pytest.raises(RequestError, match="cache_salt"):
        llm.generate([prompt], GREEDY, cache_salt=3)  # type: ignore[arg-type]


def test_the_option_is_a_truth_value(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="prefix_cache"):
        engine(folders["t32"], prefix_cache=1)
