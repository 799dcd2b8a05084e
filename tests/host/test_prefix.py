# SPDX-License-Identifier: Apache-2.0
"""Pages found again: what is shared, when it goes, and that nobody can tell."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.host import Request
from freewheel.host.prefix import PrefixCache
from freewheel.spec import CacheField, CacheGroup
from freewheel.spec.adjustments import Adjustments
from tests.host.device import VOCABULARY, solo
from tests.host.engine import Engine, Setup, history, window
from tests.host.test_fuzz import Trial, random_setup

RNG = random.Random(5)
TOKENS = tuple(RNG.randrange(VOCABULARY) for _ in range(60))


def run(engine: Engine, name: str, prompt: tuple[int, ...], salt: str = "") -> Request:
    """One request, to its end; its output must be that of the request alone."""
    request = engine.setup.request(name, prompt, max_tokens=3)
    request.cache_salt = salt
    engine.add(request)
    engine.drain()
    assert request.output == solo(request)[0]
    return request


def test_a_prompt_that_begins_like_an_earlier_one_computes_only_the_rest() -> None:
    engine = Engine(Setup())
    assert run(engine, "a", TOKENS[:30]).stats.cached_tokens == 0
    assert run(engine, "b", (*TOKENS[:22], 1, 2, 3)).stats.cached_tokens == 20
    assert run(engine, "c", TOKENS[:10]).stats.cached_tokens == 8


def test_an_answer_is_found_again_by_the_next_turn() -> None:
    engine = Engine(Setup())
    first = run(engine, "a", TOKENS[:17])
    turn = (*TOKENS[:17], *first.output, *TOKENS[20:30])
    assert run(engine, "b", turn).stats.cached_tokens == 16


@pytest.mark.parametrize("length", [12, 13, 16, 17])
def test_at_least_one_token_of_a_prompt_found_whole_is_computed(length: int) -> None:
    engine = Engine(Setup())
    run(engine, "a", TOKENS[:40])
    found = length - 1 if length % 4 == 0 else (length - 1) // 4 * 4
    assert run(engine, "b", TOKENS[:length]).stats.cached_tokens == found


def test_a_prompt_that_ends_with_a_page_of_a_running_request_takes_a_copy_of_it() -> None:
    """The device checks that each still reads its own, drafter's rows included."""
    engine = Engine(Setup(run_ahead=2))
    first = engine.setup.request("a", TOKENS[:20], max_tokens=20)
    engine.add(first)
    while len(first.output) < 6:
        engine.step()
    others = [engine.setup.request(name, TOKENS[:16], max_tokens=9) for name in "bc"]
    for other in others:
        engine.add(other)
    engine.drain()
    for request in (first, *others):
        assert request.output == solo(request)[0]
    assert [one.stats.cached_tokens for one in others] == [15, 15]
    engine.check()
    assert all(pool.owned == 0 for pool in engine.pools)


def test_where_there_is_no_page_for_the_copy_the_block_is_computed() -> None:
    setup = Setup()
    engine = Engine(setup)
    run(engine, "a", TOKENS[:12])
    request = setup.request("b", TOKENS[:12], max_tokens=1)
    engine.add(request)
    taken = [pool.allocate(pool.free) for pool in engine.pools]
    tenancy = engine.scheduler.roster.reservations.admit(request)
    assert (tenancy.start, tenancy.copies) == (8, ())
    engine.scheduler.roster.reservations.release(tenancy)
    for pool, pages in zip(engine.pools, taken, strict=True):
        pool.release(pages, -1)
    engine.drain()
    assert (request.output, request.stats.cached_tokens) == (solo(request)[0], 11)


@pytest.mark.parametrize("pages", [2, 3])
def test_a_copy_leaves_the_pages_that_the_first_rounds_need(pages: int) -> None:
    """Two hold the prompt and what follows; the page that is copied would be a third one."""
    setup = Setup(pages=(pages,), depth=1)
    engine = Engine(setup)
    run(engine, "a", TOKENS[:4])
    again = run(engine, "b", TOKENS[:4])
    assert again.stats.cached_tokens == (3 if pages == 3 else 0)
    assert (again.output, again.stats.preemptions) == (solo(again)[0], 0)


def test_a_copy_leaves_the_pages_that_running_requests_need() -> None:
    setup = Setup(pages=(8,), run_ahead=0, depth=0)
    engine = Engine(setup)
    run(engine, "a", TOKENS[:12])
    long = engine.add(setup.request("long", 12, max_tokens=8))
    while len(long.output) < 5:
        engine.step()
    again = engine.add(setup.request("b", TOKENS[:12], max_tokens=1))
    engine.drain()
    assert (again.output, long.output) == (solo(again)[0], solo(long)[0])
    assert again.stats.preemptions == long.stats.preemptions == 0
    engine.check()


def test_an_abort_before_the_copy_was_made_gives_both_pages_back() -> None:
    setup = Setup()
    engine = Engine(setup)
    run(engine, "a", TOKENS[:16])
    request = setup.request("b", TOKENS[:12], max_tokens=3)
    reserved = engine.scheduler.roster.reservations
    tenancy = reserved.admit(request)
    assert len(tenancy.copies) == len(engine.pools) and tenancy.start == 11
    owned = [pool.owned for pool in engine.pools]
    reserved.release(tenancy)
    assert [pool.owned for pool in engine.pools] == [0 for _ in owned] and all(owned)
    reserved.check()


def test_a_page_is_not_found_if_the_token_behind_it_differs() -> None:
    """The drafter's row of the page's last position has read that token."""
    engine = Engine(Setup())
    run(engine, "a", TOKENS[:30])
    other = (TOKENS[8] + 1) % VOCABULARY
    assert run(engine, "b", (*TOKENS[:8], other, 1, 2)).stats.cached_tokens == 4


def test_tenants_with_different_salts_share_nothing() -> None:
    engine = Engine(Setup())
    run(engine, "a", TOKENS[:30], salt="one")
    assert run(engine, "b", TOKENS[:30], salt="other").stats.cached_tokens == 0
    assert run(engine, "c", TOKENS[:30]).stats.cached_tokens == 0
    assert run(engine, "d", TOKENS[:30], salt="one").stats.cached_tokens == 28


def test_keys_cannot_be_told_without_the_secret() -> None:
    engine = Engine(Setup())
    one, other = (PrefixCache(engine.pools) for _ in range(2))
    request = engine.setup.request("a", TOKENS[:9])
    again = engine.setup.request("a", TOKENS[:9])
    assert one.keys(request) != other.keys(again)


def test_requests_that_arrive_together_compute_what_they_share_once() -> None:
    engine = Engine(Setup(widths=(9,), run_ahead=2))
    prompts = [(*TOKENS[:30], n, n + 1, n + 2) for n in range(4)]
    requests = [engine.add(engine.setup.request(str(n), p)) for n, p in enumerate(prompts)]
    stranger = engine.add(engine.setup.request("stranger", TOKENS[40:60]))
    engine.drain()
    assert [r.stats.cached_tokens for r in requests] == [0, 28, 28, 28]
    for request in (*requests, stranger):
        assert request.output == solo(request)[0]
    order = sorted((*requests, stranger), key=lambda r: r.stats.first_token_round or 0)
    assert order.index(stranger) < 2, "who waits for pages holds nobody up"


def test_whoever_waits_for_a_prompt_computes_it_when_that_one_is_aborted() -> None:
    engine = Engine(Setup(widths=(9,), run_ahead=1))
    first = engine.add(engine.setup.request("a", TOKENS[:40]))
    second = engine.add(engine.setup.request("b", TOKENS[:41]))
    engine.step()
    engine.abort(first)
    engine.drain()
    assert second.output == solo(second)[0]


def test_kept_pages_go_to_whoever_needs_them_the_least_recently_used_first() -> None:
    engine = Engine(Setup(pages=(16,), rows=1, context_len=60, row_width=60, depth=0))
    run(engine, "old", TOKENS[:20])
    run(engine, "new", TOKENS[20:40])
    run(engine, "old again", TOKENS[:19])
    run(engine, "large", tuple(reversed(TOKENS[:36])))
    assert run(engine, "check old", TOKENS[:20]).stats.cached_tokens > 0
    assert run(engine, "check new", TOKENS[20:40]).stats.cached_tokens == 0


def test_a_window_is_found_with_the_history_or_not_at_all() -> None:
    setup = Setup(groups=(history(), window(4, 6)), pages=(100, 8), rows=1, widths=(9,))
    engine = Engine(setup)
    run(engine, "a", TOKENS[:40])
    assert run(engine, "b", TOKENS[:40]).stats.cached_tokens == 36
    assert run(engine, "c", TOKENS[:9]).stats.cached_tokens == 0, "its window had to go"
    prefix = engine.scheduler.roster.reservations.prefix
    assert prefix is not None
    resumable = [block.latest is not None for block in prefix.blocks()]
    assert not all(resumable) and any(resumable)


def test_what_a_page_end_closes_need_not_be_kept() -> None:
    tail = CacheGroup("tail", 4, 1, 8, (CacheField("raw", 8, "float32", (0,)),), resume=0)
    engine = Engine(Setup(groups=(history(), tail), pages=(100, 12), rows=1, widths=(9,)))
    run(engine, "a", TOKENS[:40])
    assert engine.pools[1].cached == 0
    assert run(engine, "b", TOKENS[:40]).stats.cached_tokens == 36


def test_what_a_grammar_follows_is_never_passed_over() -> None:
    """A grammar's state is that of the output's tokens, so only the prompt may be found."""
    engine = Engine(Setup())
    run(engine, "a", TOKENS[:30])
    request = engine.setup.request("b", TOKENS[:14])
    request.adjustments = Adjustments(prompt_len=14, trigger=1, budget=9)
    request.output.extend(TOKENS[14:29])  # as after a preemption
    pages = engine.scheduler.roster.reservations
    assert len(pages.match(request)) == 14 // 4
    request.adjustments = None
    assert len(pages.match(request)) == 28 // 4
    request.params = replace(request.params, prompt_logprobs=0)
    assert len(pages.match(request)) == 0, "every prompt token's score is asked for"


def test_a_forgotten_request_leaves_only_what_it_had_found() -> None:
    engine = Engine(Setup())
    run(engine, "a", TOKENS[:13])
    request = engine.add(engine.setup.request("b", TOKENS[:40], max_tokens=20))
    while not request.output:
        engine.step()
    prefix = engine.scheduler.roster.reservations.prefix
    assert prefix is not None and request.tenancy is not None
    prefix.forget(request, request.tenancy)
    engine.check()
    assert len(prefix) == 3
    engine.abort(request)
    engine.drain()
    prefix.clear()
    assert all(pool.free == pool.total for pool in engine.pools)


class SharedTrial(Trial):
    """Prompts that begin alike in many ways, on pages short enough to find them."""

    def new_setup(self) -> Setup:
        while True:
            setup = super().new_setup()
            sizes = [group.page_size for group in setup.groups]
            if math.lcm(*sizes) <= 16 and any(g.retention is None for g in setup.groups):
                return setup

    def arrive(self) -> None:
        before = len(self.requests)
        super().arrive()
        if len(self.requests) == before:
            return
        request = self.requests[-1]
        twin = self.rng.choice(self.requests)
        whole = (*twin.prompt, *twin.output)
        keep = min(self.rng.randint(0, len(whole)), len(request.prompt) - 1)
        request.prompt = (*whole[:keep], *request.prompt[keep:])
        request.cache_salt = self.rng.choice(["", "", "", "salt"])
        request.block_keys.clear()
        request.block_endings.clear()


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_requests_that_begin_alike_end_as_if_each_had_run_alone(seed: int) -> None:
    trial = SharedTrial(seed)
    trial.run()
    trial.check()


def test_prompts_are_found_in_most_random_histories() -> None:
    found = 0
    for seed in range(40):
        trial = SharedTrial(seed)
        trial.run()
        found += any(request.stats.cached_tokens for request in trial.requests)
    assert found >= 12


@pytest.mark.parametrize("seed", range(20))
def test_without_a_prefix_cache_nothing_is_kept(seed: int) -> None:
    setup = random_setup(random.Random(seed))
    engine = Engine(replace(setup, prefix_cache=False))
    request = engine.setup.request("a", 10)
    engine.add(request)
    engine.drain()
    assert all(pool.cached == 0 for pool in engine.pools)
