# SPDX-License-Identifier: Apache-2.0
"""Whoever reads, in whatever order, gets the answer to the own request, whole and exact."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.errors import FreewheelError, RequestError
from tests.program.whitebox import GREEDY, answers, engine, prompts

REQUESTS = prompts(seed=4, count=4, longest=30)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=18, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["t32"]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[int, ...]]:
    llm = engine(folder, speculate=0, max_batch=1, prefill_batch=1)
    return answers(llm, REQUESTS)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    """Nothing is left behind, whatever a test does."""
    made = engine(folder)
    yield made
    gc.collect()
    assert answers(made, REQUESTS[:1], SAMPLED)  # it still runs
    reservations = made._session._scheduler.copies[0].roster.reservations
    reservations.check()
    for pool in (reservations.rows, *reservations.pools):
        assert (pool.owned, pool.quarantined) == (0, 0)


def ids(chunks: Any) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


@pytest.mark.parametrize("seed", range(3))
def test_streams_may_be_read_in_any_order(
    llm: LLM, alone: list[tuple[int, ...]], seed: int
) -> None:
    rng = random.Random(seed)
    open_streams = {n: llm.stream(request, GREEDY) for n, request in enumerate(REQUESTS)}
    got: dict[int, list[Any]] = {n: [] for n in open_streams}
    while open_streams:
        n = rng.choice(sorted(open_streams))
        chunk = next(open_streams[n], None)
        if chunk is None:
            del open_streams[n]
        else:
            got[n].append(chunk)
    assert [ids(got[n]) for n in range(len(REQUESTS))] == alone
    assert all(chunks[-1].metrics is not None for chunks in got.values())


def test_generate_may_be_called_while_streams_are_open(
    llm: LLM, alone: list[tuple[int, ...]]
) -> None:
    one, two = llm.stream(REQUESTS[0], GREEDY), llm.stream(REQUESTS[1], GREEDY)
    first = next(one)
    assert answers(llm, REQUESTS[2:]) == alone[2:]
    assert ids(two) == alone[1]
    assert answers(llm, REQUESTS) == alone
    assert ids([first, *one]) == alone[0]


def test_closing_one_stream_takes_nothing_from_another(
    llm: LLM, alone: list[tuple[int, ...]]
) -> None:
    one, two = llm.stream(REQUESTS[0], GREEDY), llm.stream(REQUESTS[1], GREEDY)
    chunks = [next(one)]
    next(two)
    two.close()
    with pytest.raises(RequestError):
        llm.generate([[1], [999]])
    assert ids([*chunks, *one]) == alone[0]


def test_a_stream_that_nobody_reads_costs_nothing(llm: LLM, alone: list[tuple[int, ...]]) -> None:
    idle = llm.stream(REQUESTS[1], GREEDY)
    assert answers(llm, REQUESTS[:1]) == alone[:1]
    assert llm.stream(REQUESTS[2], GREEDY) is not None  # dropped at once, never begun
    assert not llm._session._live
    assert ids(idle) == alone[1]


def test_a_stream_refuses_a_bad_request_at_once(llm: LLM) -> None:
    for prompt in ([], [1] * 1000, [264], ""):
        with pytest.raises(RequestError, match="prompt"):
            llm.stream(prompt)


@pytest.mark.parametrize(
    ("place", "error", "count"),
    [
        ("launch", KeyboardInterrupt, 1),
        ("launch", RuntimeError, 4),
        ("collect", KeyboardInterrupt, 3),
        ("collect", RuntimeError, 1),
    ],
)
def test_an_error_in_a_round_costs_the_requests_but_not_the_engine(
    llm: LLM,
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: type[BaseException],
    count: int,
) -> None:
    waiting = llm.stream(REQUESTS[3], GREEDY)
    next(waiting)
    real, calls = vars(type(llm.executor))[place], []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(place)
        if len(calls) == count:
            raise error
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.executor), place, failing)
        with pytest.raises(error):
            answers(llm, REQUESTS[:3])
    with pytest.raises(FreewheelError, match="dropped"):
        list(waiting)
    assert answers(llm, REQUESTS) == alone


def test_models_in_one_process_do_not_disturb_one_another(
    folders: dict[str, Path], llm: LLM, alone: list[tuple[int, ...]]
) -> None:
    other = engine(folders["tg"])
    want = answers(other, REQUESTS[:1])
    pairs = zip(llm.stream(REQUESTS[0], GREEDY), other.stream(REQUESTS[0], GREEDY), strict=False)
    ours, theirs = (ids(chunks) for chunks in zip(*pairs, strict=True))
    assert ours == alone[0][: len(ours)] and theirs == want[0][: len(theirs)]
    assert answers(other, REQUESTS[:1]) == want


def test_streamed_pieces_are_the_whole_output_for_any_tokens(folder: Path) -> None:
    """Random weights choose bytes that are no UTF-8, and control tokens."""
    llm = engine(folder)
    for seed in range(4):
        params = SamplingParams(
            temperature=2.0,
            seed=seed,
            max_tokens=40,
            ignore_eos=True,
            skip_special_tokens=seed % 2 == 0,
            stop=("\ufffd\ufffd\ufffd\ufffd",) if seed % 3 == 0 else (),
        )
        whole = llm.generate([REQUESTS[0]], params)[0]
        chunks = list(llm.stream(REQUESTS[0], params))
        assert ids(chunks) == whole.token_ids
        assert "".join(p.text for c in chunks for p in c.pieces) == whole.text
        assert chunks[-1].finish_reason == whole.finish_reason
        if not params.stop:
            assert whole.text == llm.tokenizer.decode(whole.token_ids, seed % 2 == 0)
        metrics = whole.metrics
        assert metrics.accepted <= metrics.drafted
        assert metrics.completion_tokens == len(whole.token_ids)
        assert 0 <= metrics.rounds + metrics.accepted - metrics.completion_tokens <= 1
