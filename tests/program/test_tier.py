# SPDX-License-Identifier: Apache-2.0
"""Pages in host memory: answers from there are the answers, and damage is computed anew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.errors import ConfigError
from tests.program.test_schedules import CONTEXT, Schedule, tight
from tests.program.whitebox import engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
HOST_GB = 0.05


def small(folder: Path, **options: Any) -> LLM:
    """Pages for little more than one full context."""
    return tight(folder, 1, 3, host_cache_gb=HOST_GB, **options)


def turns(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(256), k=CONTEXT - 16) for _ in range(count)]


@pytest.mark.parametrize("family", ["t32", "t4"])
def test_prompts_that_the_device_had_no_room_for_come_back_from_host_memory(
    folders: dict[str, Path], family: str
) -> None:
    llm = small(folders[family])
    cold = engine(folders[family], prefix_cache=False, max_batch=1, prefill_batch=1)
    prompts = turns(3, 8)
    first = [llm.generate([p], GREEDY)[0] for p in prompts]
    again = [llm.generate([p], GREEDY)[0] for p in prompts]
    assert [one.token_ids for one in again] == [one.token_ids for one in first]
    assert [one.token_ids for one in first] == [
        cold.generate([p], GREEDY)[0].token_ids for p in prompts
    ]
    block = max(group.page_size for group in llm.built.groups)
    whole = (len(prompts[0]) - 1) // block * block
    assert all(one.metrics.cached_tokens == whole for one in again)
    assert sum(one.metrics.cached_host_tokens > 0 for one in again) >= 2
    assert [one.metrics.accepted for one in again] == [one.metrics.accepted for one in first]


def test_a_damaged_block_is_computed_anew_and_counted(folders: dict[str, Path]) -> None:
    llm = small(folders["t32"])
    prompts = turns(4, 4)
    first = [llm.generate([p], GREEDY)[0].token_ids for p in prompts]
    mover = llm.executor.mover
    for slot in range(mover.slots):
        mover.slot(slot)[slot % 40] ^= 1 << slot % 8
    assert [llm.generate([p], GREEDY)[0].token_ids for p in prompts] == first
    moves = llm._session.scheduler.copies[0].roster.reservations.moves
    assert moves is not None and moves.counts.damaged > 0
    third = [llm.generate([p], GREEDY)[0] for p in prompts]
    assert [one.token_ids for one in third] == first


class TierSchedule(Schedule):
    """As on the device alone; now and then a bit of host memory turns over."""

    def check_pages(self) -> None:
        roster = self.llm._session.scheduler.copies[0].roster
        roster.reservations.check()
        for group, pool in enumerate(roster.reservations.pools):
            held = {page for request in roster.running for page in request.pages[group]}
            assert len(held | pool._lent.keys()) == pool.owned
        if self.rng.random() < 0.02:
            self.llm.executor.mover.slot(self.rng.randrange(8))[self.rng.randrange(40)] ^= 4

    def check(self, cold: LLM) -> None:
        super().check(cold)
        self.seen["fetched"] += sum(one.request.stats.host_tokens > 0 for one in self.live)


def run_schedules(folder: Path, count: int, seed: int, run_aheads: tuple[int, ...]) -> int:
    cold = engine(folder, prefix_cache=False, max_batch=1, prefill_batch=1, context_len=CONTEXT)
    fetched = 0
    for run_ahead in run_aheads:
        llm = tight(folder, run_ahead, (3, 1, 7, 2)[run_ahead], host_cache_gb=HOST_GB)
        for number in range(count):
            schedule = TierSchedule(llm, random.Random(1000 * seed + 10 * number + run_ahead))
            schedule.run()
            schedule.check(cold)
            fetched += schedule.seen["fetched"]
    return fetched


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t32", "t4"])
def test_answers_with_host_memory_are_those_of_cold_engines(
    folders: dict[str, Path], family: str
) -> None:
    run_schedules(folders[family], 1, seed=1, run_aheads=(1,))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["t32", "t4"])
def test_answers_with_host_memory_under_a_hundred_schedules(
    folders: dict[str, Path], family: str
) -> None:
    assert run_schedules(folders[family], 25, 2, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_cache_gb": -1}, "host_cache_gb: must be 0"),
        ({"host_cache_gb": True}, "host_cache_gb: must be 0"),
        ({"host_cache_gb": 1e-9}, "does not hold one block"),
        ({"host_cache_gb": 1, "prefix_cache": False}, "prefix_cache is off"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    folders: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(folders["t32"], **options)
