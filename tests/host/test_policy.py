# SPDX-License-Identifier: Apache-2.0
"""Who goes first: priorities, tenants, and the turns of prompts and of decoding."""

from __future__ import annotations

import random
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.host import Request, RequestState
from freewheel.host.roster import PATIENCE
from freewheel.host.tenants import Tenants
from freewheel.spec import MAX_VERIFY_WIDTH
from tests.host.device import solo
from tests.host.engine import Engine, Setup


def starts(engine: Engine, *requests: Request) -> list[str]:
    """The requests' names in the order of their first admission."""
    names = {request.seed: request.id for request in requests}
    admitted = [a.seed for plan in engine.plans for a in plan.admissions if a is not None]
    return list(dict.fromkeys(names[seed] for seed in admitted if seed in names))


def test_the_lower_priority_value_goes_first_and_equals_in_order_of_arrival() -> None:
    engine = Engine(Setup(rows=1, prefill_batch=1))
    wanted = [("a", 0), ("b", 3), ("c", -2), ("d", 0), ("e", -2)]
    requests = [engine.add(engine.setup.request(n, 5, 3, priority=p)) for n, p in wanted]
    engine.drain()
    assert starts(engine, *requests) == ["c", "e", "a", "d", "b"]
    assert all(request.output == solo(request)[0] for request in requests)


def test_pages_are_taken_from_the_worst_priority_and_of_those_from_the_youngest() -> None:
    setup = Setup(pages=(28,), rows=4, prefill_batch=4, run_ahead=1, prefix_cache=False)
    engine = Engine(setup)
    wanted = [("low", 5), ("first", 0), ("second", 0), ("high", -1)]
    requests = {n: engine.add(setup.request(n, 8, 40, priority=p)) for n, p in wanted}
    while not any(r.stats.preemptions for r in requests.values()):
        engine.step()
    lost = {name for name, request in requests.items() if request.stats.preemptions}
    assert lost == {"low"}
    while not requests["second"].stats.preemptions:
        assert not requests["first"].stats.preemptions
        engine.step()
    engine.drain()
    assert not requests["high"].stats.preemptions
    assert all(request.output == solo(request)[0] for request in requests.values())


def test_a_prompt_of_better_priority_passes_a_long_one_that_has_begun() -> None:
    engine = Engine(Setup(widths=(9,), prefill_batch=1, run_ahead=0))
    long = engine.add(engine.setup.request("long", 60, 2, priority=1))
    engine.step()
    short = engine.add(engine.setup.request("short", 12, 2))
    while not short.output:
        engine.step()
    assert long.state is RequestState.PREFILLING and long.stats.prefill_rounds == 1
    engine.drain()


@pytest.mark.parametrize("long", [6, 60])
def test_the_lowest_priority_has_its_share_of_prompts_under_a_flood(long: int) -> None:
    """Two of better priority come in every round, more than can be served."""
    engine = Engine(Setup(rows=3, max_batch=3, prefill_batch=1, widths=(9,), run_ahead=1))
    low = engine.add(engine.setup.request("low", long, 12, priority=1_000_000))
    names = count()
    for _ in range(80 * (1 + long // 9)):
        for _ in range(2):
            engine.add(engine.setup.request(f"{next(names)}", 6, 2, priority=-1_000_000))
        engine.step()
        if low.finish is not None:
            break
    assert low.output == solo(low)[0]
    prompts = [p for p in engine.plans if p.shape.width > MAX_VERIFY_WIDTH]
    first = next(
        index
        for index, plan in enumerate(prompts)
        if any(a is not None and a.seed == low.seed for a in plan.admissions)
    )
    assert first <= PATIENCE + 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_nobody_starves_whatever_keeps_coming(seed: int) -> None:
    """Random victims under an endless flood of better priority, on few pages."""
    rng = random.Random(seed)
    setup = Setup(
        rows=rng.randint(1, 4),
        prefill_batch=rng.randint(1, 3),
        widths=(9,),
        pages=(rng.choice([20, 24, 60]),),
        run_ahead=rng.randint(0, 3),
        prefill_share=rng.choice([0.2, 0.5, 0.8]),
        prefix_cache=rng.random() < 0.5,
    )
    engine = Engine(setup, rng)
    names = count()

    def flood() -> None:
        prompt, tokens = rng.randint(1, 30), rng.randint(1, 20)
        request = setup.request(f"{next(names)}", prompt, tokens, priority=rng.randint(-3, 0))
        request.tenant = rng.choice("ab")
        engine.add(request)

    for _ in range(6):
        flood()
    victims = [
        engine.add(setup.request(f"v{n}", rng.randint(1, 40), 10, priority=rng.randint(1, 9)))
        for n in range(3)
    ]
    for _ in range(2500):
        flood()
        engine.step()
        if all(victim.finish is not None for victim in victims):
            break
    assert all(victim.output == solo(victim)[0] for victim in victims)


def test_tenants_share_evenly_however_many_requests_one_of_them_brings() -> None:
    engine = Engine(Setup(rows=2, max_batch=2, prefill_batch=1))
    busy = [engine.add(engine.setup.request(f"busy {n}", 8, 8, tenant="busy")) for n in range(20)]
    calm = [engine.add(engine.setup.request(f"calm {n}", 8, 8, tenant="calm")) for n in range(5)]
    engine.drain()
    order = starts(engine, *busy, *calm)
    last = max(order.index(request.id) for request in calm)
    assert last <= 10, "five of each have begun when the calm tenant's last one begins"
    assert [n for n in order if n.startswith("busy")] == [r.id for r in busy]


def test_a_tenant_of_long_requests_gets_as_many_tokens_as_one_of_short_ones() -> None:
    engine = Engine(Setup(rows=1, max_batch=1, prefill_batch=1, context_len=64))
    for n in range(40):
        engine.add(engine.setup.request(f"long {n}", 40, 20, tenant="long"))
        for k in range(6):
            engine.add(engine.setup.request(f"short {n} {k}", 5, 5, tenant="short"))
    for _ in range(400):
        engine.step()
    tenants = engine.scheduler.roster.waiting.tenants
    assert abs(tenants.served("long") - tenants.served("short")) <= 70


def test_a_pause_saves_nothing_up_and_forgives_nothing() -> None:
    tenants = Tenants()
    for name in ("a", "b"):
        tenants.enter(name)
    tenants.charge("a", 500)
    tenants.charge("b", 900)
    tenants.leave("b")
    tenants.enter("newcomer")
    assert tenants.served("newcomer") == 500
    tenants.enter("b")
    assert tenants.served("b") == 900
    for name in ("a", "b", "newcomer"):
        tenants.leave(name)
    assert len(tenants) == 0


def test_what_is_remembered_of_absent_tenants_stays_bounded() -> None:
    tenants = Tenants()
    tenants.enter("resident")
    for n in range(10_000):
        tenants.enter(f"{n}")
        tenants.charge(f"{n}", 10)
        tenants.leave(f"{n}")
        tenants.charge("resident", 5)
    assert len(tenants) < 10


@pytest.mark.parametrize(("share", "per_prompt"), [(0.5, 1), (0.2, 4), (0.1, 9)])
def test_a_small_share_puts_decoding_rounds_between_prompts(share: float, per_prompt: int) -> None:
    setup = Setup(widths=(9,), context_len=200, row_width=210, prefill_share=share, depth=0)
    engine = Engine(setup)
    engine.add(setup.request("a", 3, max_tokens=190))
    engine.step()
    engine.add(setup.request("b", 90))
    kinds: list[bool] = []
    while sum(kinds) < 6:
        engine.step()
        kinds = [plan.shape.width > MAX_VERIFY_WIDTH for plan in engine.plans]
    prompts = [index for index, prompt in enumerate(kinds) if prompt][1:]
    gaps = [b - a - 1 for a, b in pairwise(prompts)]
    assert gaps == [per_prompt] * 4
    engine.drain()


def test_a_large_share_puts_prompts_between_decoding_rounds() -> None:
    setup = Setup(widths=(9,), context_len=200, row_width=210, prefill_share=0.8, depth=0)
    engine = Engine(setup)
    engine.add(setup.request("a", 3, max_tokens=190))
    engine.step()
    engine.add(setup.request("b", 150))
    for _ in range(16):
        engine.step()
    kinds = "".join("p" if p.shape.width > MAX_VERIFY_WIDTH else "d" for p in engine.plans)
    assert "ppppdppppd" in kinds
    engine.drain()


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, 2.0])
def test_a_share_that_starves_one_kind_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="prefill_share"):
        Setup(prefill_share=share).scheduler()
