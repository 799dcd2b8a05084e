# SPDX-License-Identifier: Apache-2.0
"""What the scheduler accepts, in which order it serves, and how a request ends."""

from __future__ import annotations

import dataclasses
import random

import pytest

from freewheel.errors import CapacityError, ConfigError, FreewheelError, RequestError
from freewheel.host import RequestState, Update
from freewheel.spec import MAX_VERIFY_WIDTH, FinishReason, StepPlan, StepResult
from tests.host.device import solo
from tests.host.engine import Engine, Setup, history, window


def for_prompts(plan: StepPlan) -> bool:
    return plan.shape.width > MAX_VERIFY_WIDTH


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt"):
        Engine(Setup()).add(Setup().request("a", 0))


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_both_numbers() -> None:
    setup = Setup(context_len=20)
    with pytest.raises(RequestError, match=r"20 tokens.*19"):
        Engine(setup).add(setup.request("a", 20))
    engine = Engine(setup)
    request = engine.add(setup.request("b", 19))
    engine.drain()
    assert (len(request.output), request.finish) == (1, FinishReason.LENGTH)


def test_an_id_in_use_is_refused_until_its_request_has_ended() -> None:
    engine = Engine(Setup())
    engine.add(engine.setup.request("a", 3))
    with pytest.raises(RequestError, match="in use"):
        engine.add(engine.setup.request("a", 3))
    engine.drain()
    engine.add(engine.setup.request("a", 3))


def test_too_many_stop_ids_are_refused() -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        Setup().request("a", 3, stop_ids=tuple(range(9)))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"chunk": 8}, "chunk"),
        ({"run_ahead": -1}, "run_ahead"),
        ({"context_len": 81}, "context_len"),
        ({"pages": (10, 10)}, "group_pages"),
        ({"rows": 0}, "rows"),
    ],
)
def test_options_out_of_range_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(Setup(), **wrong).scheduler()


def test_a_request_larger_than_the_pool_is_refused_and_the_next_one_runs() -> None:
    setup = Setup(pages=(8,))
    engine = Engine(setup)
    with pytest.raises(CapacityError, match="max_tokens: 20 prompt tokens"):
        engine.add(setup.request("a", 20, max_tokens=30))
    with pytest.raises(CapacityError, match="prompt: 40 prompt tokens"):
        engine.add(setup.request("b", 40, max_tokens=2))
    request = engine.add(setup.request("c", 20, max_tokens=5))
    engine.drain()
    assert request.output == solo(request)[0]


def test_a_window_needs_pages_for_its_width_and_not_for_the_context() -> None:
    group = window(page_size=4, retention=6)
    need = (6 + 16 + 3 - 2) // 4 + 2
    for pages, fits in ((need, True), (need - 1, False)):
        setup = Setup(groups=(group,), pages=(pages,), context_len=60)
        engine = Engine(setup)
        request = setup.request("a", 40, max_tokens=20)
        if fits:
            engine.add(request)
            engine.drain()
            assert request.output == solo(request)[0]
        else:
            with pytest.raises(CapacityError, match="window"):
                engine.add(request)


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
def test_no_more_rounds_are_in_flight_than_run_ahead_allows(run_ahead: int) -> None:
    engine = Engine(Setup(run_ahead=run_ahead))
    engine.add(engine.setup.request("a", 3, max_tokens=40))
    while engine.launch() is not None:
        pass
    assert engine.scheduler.in_flight == 1 + run_ahead
    engine.collect()
    assert engine.launch() is not None
    assert engine.launch() is None


def test_the_first_token_comes_from_the_round_of_the_last_chunk() -> None:
    engine = Engine(Setup(run_ahead=0, widths=(9,)))
    request = engine.add(engine.setup.request("a", 21))
    assert request.state is RequestState.WAITING
    counts: list[int] = []
    for _ in range(4):
        counts.append(sum(len(update.tokens) for update in engine.step()))
    assert counts[:3] == [0, 0, 1]
    assert counts[3] >= 1
    stats = request.stats
    assert (stats.first_token_round, stats.first_token_time) == (2, 2.0)
    assert (stats.prefill_rounds, stats.decode_rounds, stats.rounds) == (3, 1, 4)


def test_a_row_decodes_before_the_letter_of_its_prompt_is_read() -> None:
    engine = Engine(Setup(run_ahead=3))
    request = engine.add(engine.setup.request("a", 5, max_tokens=30))
    kinds: list[bool] = []
    for _ in range(4):
        plan = engine.launch()
        assert plan is not None
        kinds.append(for_prompts(plan))
    assert kinds == [True, False, False, False]
    assert request.state is RequestState.DECODING
    assert (request.lower, request.upper) == (0, 5 + 3 * 4)


def test_every_chunk_carries_the_token_behind_it() -> None:
    engine = Engine(Setup(run_ahead=3, widths=(9,)))
    request = engine.add(engine.setup.request("a", 20))
    feeds = [feed for _ in range(3) if (plan := engine.launch()) for feed in plan.feeds if feed]
    assert [(feed.start, len(feed.tokens)) for feed in feeds] == [(0, 10), (9, 10), (18, 2)]
    assert all(
        feed.tokens == request.prompt[feed.start : feed.start + len(feed.tokens)] for feed in feeds
    )


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("prompt", [4, 8, 16, 63, 64, 65])
def test_prompts_around_a_page_multiple_run_like_any_other(size: int, prompt: int) -> None:
    for run_ahead in range(4):
        setup = Setup(
            groups=(history(size),), context_len=90, row_width=96, run_ahead=run_ahead, chunk=9
        )
        engine = Engine(setup)
        request = engine.add(setup.request("a", prompt, max_tokens=None))
        engine.drain()
        assert request.output == solo(request)[0]


def test_prompts_and_decoding_alternate_while_both_have_work() -> None:
    engine = Engine(Setup(widths=(9,), context_len=60))
    short = engine.add(engine.setup.request("a", 3, max_tokens=50))
    engine.step()
    engine.add(engine.setup.request("b", 50))
    engine.drain()
    assert short.output == solo(short)[0]
    kinds = [for_prompts(plan) for plan in engine.plans]
    long = [index for index, plan in enumerate(engine.plans) if for_prompts(plan)][1:]
    assert len(long) == 6
    assert kinds[long[0] : long[-1] + 1] == [True, False] * 5 + [True]


@pytest.mark.parametrize(("prompts", "batch"), [(1, 1), (2, 2), (3, 4), (4, 4), (6, 4)])
def test_prompts_of_like_length_share_a_rectangle(prompts: int, batch: int) -> None:
    setup = Setup(widths=(9, 16), prefill_batch=4, rows=6)
    engine = Engine(setup)
    for index in range(prompts):
        engine.add(setup.request(f"{index}", 10 + index))
    first = engine.launch()
    assert first is not None
    assert (first.shape.batch, first.shape.width, len(first.rows)) == (batch, 16, min(prompts, 4))


@pytest.mark.parametrize(("chunk", "width"), [(9, 9), (15, 9), (16, 16), (40, 32), (None, 32)])
def test_a_chunk_is_the_widest_rectangle_within_the_cap(chunk: int | None, width: int) -> None:
    engine = Engine(Setup(widths=(9, 16, 32), chunk=chunk, prefill_batch=1))
    engine.add(engine.setup.request("a", 50))
    plan = engine.launch()
    assert plan is not None
    assert plan.shape.width == width


def test_a_short_prompt_does_not_double_the_price_of_a_long_chunk_but_gets_its_turn() -> None:
    engine = Engine(Setup(widths=(9, 64), context_len=400, row_width=420, max_batch=2))
    engine.add(engine.setup.request("long", 300))
    engine.launch()
    engine.add(engine.setup.request("short", 5))
    shapes = [
        (plan.shape.batch, plan.shape.width)
        for _ in range(6)
        if engine.step() is not None
        for plan in engine.plans[-1:]
        if for_prompts(plan)
    ]
    assert (2, 64) not in shapes
    assert (1, 9) in [(p.shape.batch, p.shape.width) for p in engine.plans[:4]]


def test_long_prompts_that_cannot_share_a_rectangle_take_turns() -> None:
    engine = Engine(Setup(widths=(9,), context_len=100, row_width=100, prefill_batch=1))
    for name in "ab":
        engine.add(engine.setup.request(name, 80))
    for _ in range(8):
        engine.step()
    assert [plan.rows for plan in engine.plans[:8]] == [(1,), (2,)] * 4


def test_rows_beyond_the_batch_take_turns() -> None:
    setup = Setup(max_batch=2, rows=5, prefill_batch=4, depth=0)
    engine = Engine(setup)
    requests = [engine.add(setup.request(f"{n}", 4, max_tokens=50)) for n in range(5)]
    for _ in range(20):
        engine.step()
    before = [request.stats.decode_rounds for request in requests]
    for _ in range(50):
        engine.step()
    rounds = [r.stats.decode_rounds - b for r, b in zip(requests, before, strict=True)]
    assert rounds == [20] * 5
    engine.drain()
    assert all(request.output == solo(request)[0] for request in requests)


def test_new_requests_join_while_others_decode() -> None:
    engine = Engine(Setup(rows=3))
    first = engine.add(engine.setup.request("a", 4, max_tokens=40))
    for _ in range(3):
        engine.step()
    second = engine.add(engine.setup.request("b", 4, max_tokens=4))
    engine.drain()
    assert engine.endings(second) == engine.endings(first) == [FinishReason.LENGTH]
    ends = [u.request.id for u in engine.updates if u.finish]
    assert ends == ["b", "a"]


def test_no_round_is_launched_that_cannot_bring_a_token() -> None:
    engine = Engine(Setup(run_ahead=3, depth=0))
    engine.add(engine.setup.request("a", 4, max_tokens=5))
    engine.drain()
    assert len(engine.plans) == 5


def test_max_tokens_ends_in_the_letter_that_reaches_it() -> None:
    for run_ahead in range(4):
        engine = Engine(Setup(run_ahead=run_ahead))
        request = engine.add(engine.setup.request("a", 4, max_tokens=9))
        engine.drain()
        assert len(request.output) == 9
        assert engine.endings(request) == [FinishReason.LENGTH]
        assert request.state is RequestState.FINISHED


def test_stop_ids_wait_for_min_tokens() -> None:
    every = tuple(range(8))
    for minimum in (0, 6):
        engine = Engine(Setup(context_len=300, row_width=320))
        request = engine.add(engine.setup.request("a", 4, 200, minimum, every))
        engine.drain()
        assert request.finish is FinishReason.STOP
        assert request.output == solo(request)[0]
        assert not set(request.output[:minimum]) & set(every)


def test_an_abort_during_chunked_prefill_returns_everything() -> None:
    setup = Setup(widths=(9,), prefill_batch=4, rows=3, pages=(60,))
    engine = Engine(setup)
    for turn in range(20):
        requests = [engine.add(setup.request(f"{turn}.{n}", 60, max_tokens=3)) for n in range(3)]
        for _ in range(2):
            engine.step()
        assert requests[1].state is RequestState.PREFILLING
        update = engine.abort(requests[1])
        assert update == Update(requests[1], (), 0, FinishReason.ABORT)
        engine.drain()
        assert engine.endings(requests[1]) == [FinishReason.ABORT]
        assert requests[0].output == solo(requests[0])[0]


def test_an_abort_while_waiting_needs_no_round() -> None:
    engine = Engine(Setup(rows=1))
    request = engine.add(engine.setup.request("a", 4))
    engine.abort(request)
    assert engine.scheduler.idle
    assert engine.launch() is None
    assert engine.endings(request) == [FinishReason.ABORT]


@pytest.mark.parametrize("before", [True, False])
def test_an_abort_in_the_last_step_gives_one_ending(before: bool) -> None:
    engine = Engine(Setup(run_ahead=0))
    request = engine.add(engine.setup.request("a", 4, max_tokens=1))
    engine.launch()
    engine.execute()
    if before:
        engine.abort(request)
        assert engine.collect() == []
        assert request.stats.dropped == 1
    else:
        engine.collect()
        assert engine.abort(request) is None
    assert len(engine.endings(request)) == 1
    assert engine.scheduler.idle


def test_an_abort_of_an_unknown_request_is_no_event() -> None:
    assert Engine(Setup()).scheduler.abort("nobody") is None


def test_a_stop_on_the_host_drops_what_is_in_flight() -> None:
    engine = Engine(Setup(run_ahead=3))
    request = engine.add(engine.setup.request("a", 4, max_tokens=50))
    other = engine.add(engine.setup.request("b", 4, max_tokens=50))
    while len(request.output) < 10:
        engine.step()
    while engine.launch() is not None:
        pass
    assert engine.scheduler.finish("a", FinishReason.STOP, length=7)
    assert request.state is RequestState.FINISHED
    rounds = len(engine.plans)
    seen = len(engine.tokens(request))
    engine.drain()
    assert request.output == solo(request)[0][:7]
    assert len(engine.tokens(request)) == seen
    assert request.stats.dropped >= 3
    assert all(len(plan.rows) == 1 for plan in engine.plans[rounds:])
    assert other.output == solo(other)[0]


def test_a_stop_string_in_the_last_letter_replaces_the_devices_verdict() -> None:
    engine = Engine(Setup())
    request = engine.add(engine.setup.request("a", 4, max_tokens=6))
    while request.finish is None:
        engine.step()
    assert request.finish is FinishReason.LENGTH
    assert engine.scheduler.finish("a", FinishReason.STOP, length=5)
    assert (request.finish, len(request.output)) == (FinishReason.STOP, 5)


def test_a_host_stop_for_nobody_is_refused() -> None:
    engine = Engine(Setup())
    request = engine.add(engine.setup.request("a", 4, max_tokens=6))
    with pytest.raises(RequestError, match="length"):
        engine.scheduler.finish("a", FinishReason.STOP, length=1)
    engine.abort(request)
    assert not engine.scheduler.finish("a", FinishReason.STOP)
    assert request.finish is FinishReason.ABORT


def test_a_letter_that_is_not_due_is_refused() -> None:
    engine = Engine(Setup())
    with pytest.raises(FreewheelError, match="none is in flight"):
        engine.scheduler.collect(StepResult(0, ()))
    engine.add(engine.setup.request("a", 4))
    plan = engine.launch()
    assert plan is not None
    result = engine.device.execute(plan)
    row = result.rows[0]
    for wrong in (
        StepResult(1, result.rows),
        StepResult(0, ()),
        StepResult(0, (dataclasses.replace(row, row=2),)),
        StepResult(0, (dataclasses.replace(row, computed=5),)),
    ):
        with pytest.raises(FreewheelError):
            engine.scheduler.collect(wrong)


def test_accepted_drafts_are_counted() -> None:
    engine = Engine(Setup(), random.Random(3))
    request = engine.add(engine.setup.request("a", 4, max_tokens=40))
    engine.drain()
    stats = request.stats
    assert stats.agreed == sum(u.accepted for u in engine.updates) > 0
    assert stats.drafted >= stats.agreed
    assert all(0 <= u.accepted <= len(u.tokens) for u in engine.updates)
    assert len(request.output) == stats.agreed + stats.rounds - (
        1 if engine.updates[-1].accepted == len(engine.updates[-1].tokens) else 0
    )
