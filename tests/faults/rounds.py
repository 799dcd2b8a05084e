# SPDX-License-Identifier: Apache-2.0
"""Faults inside an engine, and of the processes that it asks about grammars."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from freewheel import LLM, FinishReason, SamplingParams
from freewheel.engine.session import Live
from freewheel.errors import RequestError
from freewheel.host import TextStream
from freewheel.spec import StepPlan, StepResult
from freewheel.structured.process import WorkerProcess
from tests.faults.seen import ENGINE_ERROR, ENGINE_LOST, NOT_READY, REFUSED, SAME, Seen, Strike
from tests.program.whitebox import caches_of, engine
from tests.waiting import PATIENCE

PROMPT, OTHER = [7] * 21, [5, 6, 9]
FREE = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
BIASED = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logit_bias={3: -9})
NESTED = SamplingParams(temperature=0, max_tokens=16, grammar='start: "a" start | "b"',
                        logit_bias={ord("a"): 9})  # fmt: skip


@dataclass
class Case:
    """A request that the fault is meant for, and one beside it. `round`: those launched so far."""

    llm: LLM
    victim: Live
    other: Live
    round: int = 0

    @property
    def row(self) -> int:
        assert self.victim.request.row is not None
        return self.victim.request.row


Inflict = Callable[[Case], None]
Want = dict[int, tuple[int, ...]]
"""Tokens, by the id of what was asked for; of the other request by that of its prompt."""


def nan_logits(case: Case) -> None:
    case.llm.executor.state.adjust.bias_values[case.row, 0] = torch.nan


def nan_in_cache(case: Case) -> None:
    """In what is attended to. A key of the indexer that is NaN is never picked, and shows only in
    the checksums of a canary."""
    for (_, name), tensor in caches_of(case.llm).items():
        if name.startswith("latent"):
            tensor[:, list(case.victim.request.pages[0])] = torch.nan


def raising(error: Callable[[], BaseException]) -> Inflict:
    """The next launch fails in the middle."""

    def inflict(case: Case) -> None:
        executor, launch = case.llm.executor, case.llm.executor.launch

        def fail(plan: StepPlan) -> None:
            executor.launch = launch  # type: ignore[method-assign]
            raise error()

        executor.launch = fail  # type: ignore[method-assign]

    return inflict


def letters(change: Callable[[StepResult], StepResult]) -> Inflict:
    """The next letter home is another."""

    def inflict(case: Case) -> None:
        executor, collect = case.llm.executor, case.llm.executor.collect

        def wrong() -> StepResult:
            executor.collect = collect  # type: ignore[method-assign]
            return change(collect())

        executor.collect = wrong  # type: ignore[method-assign]

    return inflict


def lost_letter(case: Case) -> None:
    case.llm.executor.collect()


def late_letter(letter: StepResult) -> StepResult:
    time.sleep(0.3)
    return letter


def impossible_letter(letter: StepResult) -> StepResult:
    return replace(letter, rows=tuple(replace(row, computed=10_000) for row in letter.rows))


def to_guides(kind: signal.Signals) -> Inflict:
    """Sent to the process that follows grammars, once it has begun with this one."""

    def inflict(case: Case) -> None:
        process = case.llm._guides._process._process
        assert process is not None
        os.kill(process.pid, kind)

    return inflict


def whole_engine(folders: dict[str, Path]) -> LLM:
    """Every fault strikes the same engine: it is whole again after each."""
    return engine(folders["t32"], speculate=3, run_ahead=2, max_batch=2, graph="eager")


def undisturbed(llm: LLM) -> Want:
    """The tokens of requests that nothing strikes."""
    if_free, other = (one.token_ids for one in llm.generate([PROMPT, OTHER], FREE))
    found = {id(FREE): if_free, id(OTHER): other}
    for params in (NESTED, BIASED):
        found[id(params)] = llm.generate([PROMPT], params)[0].token_ids
    return found


def add(llm: LLM, prompt: list[int], params: SamplingParams) -> Live:
    return llm._session.add(llm._request(prompt, params, ""), TextStream(lambda ids: ""))


def run_to_end(case: Case, inflict: Inflict, seen: Seen) -> None:
    """The fault strikes once both requests have said something."""
    session = case.llm._session
    while not (case.victim.request.output and case.other.request.output):
        session.step()
    seen.begun = time.monotonic()
    inflict(case)
    while session.busy:
        session.step()


def strike(
    request: pytest.FixtureRequest,
    inflict: Inflict,
    ends: FinishReason | type[BaseException] | None,
    params: SamplingParams,
) -> Seen:
    """`ends`: how the request ends; an exception ends others as well. None: as if nothing were."""
    pytest.importorskip("llguidance")
    llm, want = request.getfixturevalue("llm"), request.getfixturevalue("want")
    prefix = llm._session.scheduler.copies[0].roster.reservations.prefix
    assert prefix is not None
    prefix.clear()  # the pages that are struck are the row's own
    case, seen = Case(llm, add(llm, PROMPT, params), add(llm, OTHER, FREE)), Seen()
    llm._guides._seconds = 1.0 if ends is FinishReason.ERROR else PATIENCE
    with pytest.raises(ends) if isinstance(ends, type) else nullcontext():
        run_to_end(case, inflict, seen)
    check_outputs(case, ends, params, want)
    llm._guides._seconds = PATIENCE
    after = [one.token_ids for one in llm.generate([PROMPT, OTHER], FREE)]
    assert after == [want[id(FREE)], want[id(OTHER)]]
    seen.over()
    if params is NESTED:
        assert llm.generate([PROMPT], NESTED)[0].token_ids == want[id(NESTED)]
    for pool in llm._session.scheduler.copies[0].roster.reservations.pools:
        assert pool.free + pool.cached == pool.total
    if isinstance(ends, type):
        seen.told, seen.others = ENGINE_LOST, SAME  # a turn that raises ends the engine
    elif case.victim.request.finish is FinishReason.ERROR:
        seen.told = ENGINE_ERROR
    return seen


def check_outputs(
    case: Case,
    ends: FinishReason | type[BaseException] | None,
    params: SamplingParams,
    want: Want,
) -> None:
    victim, other = case.victim.request, case.other.request
    assert tuple(victim.output) == want[id(params)][: len(victim.output)]
    assert tuple(other.output) == want[id(OTHER)][: len(other.output)]
    if not isinstance(ends, type):
        assert victim.finish is (ends or victim.finish)
        assert tuple(other.output) == want[id(OTHER)], "the other one noticed"
    if ends is None:
        assert tuple(victim.output) == want[id(params)]


def in_a_round(
    inflict: Inflict,
    ends: FinishReason | type[BaseException] | None,
    params: SamplingParams = FREE,
) -> Strike:
    return lambda request: strike(request, inflict, ends, params)


def nan_in_a_kept_prompt(request: pytest.FixtureRequest) -> Seen:
    """One may be the request's own fault; the second one clears the prompt away."""
    folders: dict[str, Path] = request.getfixturevalue("folders")
    llm = engine(folders["t32"], speculate=3, max_batch=2, graph="eager")
    want = llm.generate([PROMPT], FREE)[0].token_ids
    seen = Seen()
    for tensor in caches_of(llm).values():
        tensor[:] = torch.nan  # all that is kept, and what is free
    ends = [llm.generate([PROMPT], FREE)[0] for _ in range(4)]
    assert [one.finish_reason is FinishReason.ERROR for one in ends] == [True, True, False, False]
    assert ends[2].token_ids == ends[3].token_ids == want
    assert ends[3].metrics.cached_tokens > 0
    return seen.over(ENGINE_ERROR)


def no_memory_at_the_start(error: type[BaseException]) -> Strike:
    """The server starts another engine whenever one ends before it is ready."""

    def struck(request: pytest.FixtureRequest) -> Seen:
        folders: dict[str, Path] = request.getfixturevalue("folders")
        patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")

        def full(*_: Any, **__: Any) -> None:
            raise error("no memory")

        seen = Seen()
        with patch.context() as inner:
            inner.setattr("freewheel.state.arena.Arena.new", full)
            with pytest.raises(error):
                engine(folders["t32"])
        assert engine(folders["t32"]).generate([OTHER], FREE)[0].token_ids
        return seen.over(NOT_READY, SAME)

    return struck


@contextmanager
def struck(kind: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever process is asked next is sent a signal before."""
    exchange = WorkerProcess._exchange

    def strike(self: WorkerProcess, letter: tuple[bytes, ...], seconds: float) -> Any:
        if len(letter) == 1:  # a question, not the vocabulary
            assert self._process is not None
            self._process.send_signal(kind)
        return exchange(self, letter, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "_exchange", strike)
        yield


def compiler_is_sent(kind: signal.Signals) -> Strike:
    def strike(request: pytest.FixtureRequest) -> Seen:
        pytest.importorskip("freewheel.structured.worker")
        llm: LLM = request.getfixturevalue("llm")
        patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        wish = SamplingParams(regex=f"[a-c]{{{4 + kind}}}", max_tokens=40)
        llm._compiler._process.start()
        llm._compiler._seconds, seen = 0.5, Seen()
        refused = pytest.raises(RequestError, match="regex: was not compiled")
        with struck(kind, patch), refused:
            llm.generate([OTHER], wish)
        llm._compiler._seconds = PATIENCE
        assert llm.generate([OTHER], wish)[0].finish_reason is FinishReason.STOP
        return seen.over(REFUSED)

    return strike
