# SPDX-License-Identifier: Apache-2.0
"""Faults inside an engine: what becomes of the request, what others see, and when it is over.

Those of whole processes are in `tests/server/test_faults.py` and `test_link_faults.py`; the list of
all is in docs/faults.md.
"""

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
from freewheel.errors import FreewheelError, RequestError
from freewheel.host import TextStream
from freewheel.spec import StepPlan, StepResult
from freewheel.structured.process import WorkerProcess
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


@dataclass(frozen=True)
class Fault:
    """`ends`: how its request ends; an exception ends others as well. None: as if nothing were.
    Behind it the engine answers as before."""

    inflict: Inflict
    ends: FinishReason | type[BaseException] | None
    params: SamplingParams = FREE


FAULTS = {
    "NaN logits in one row": Fault(nan_logits, FinishReason.ERROR, params=BIASED),
    "NaN in a row's cache": Fault(nan_in_cache, FinishReason.ERROR),
    "kernel error in a round": Fault(
        raising(lambda: RuntimeError("CUDA error: an illegal memory access")), RuntimeError
    ),
    "no memory in a round": Fault(
        raising(lambda: torch.OutOfMemoryError("CUDA out of memory")), RuntimeError
    ),
    "no host memory in a round": Fault(raising(MemoryError), MemoryError),
    "interrupt in a round": Fault(raising(KeyboardInterrupt), KeyboardInterrupt),
    "lost letter": Fault(lost_letter, FreewheelError),
    "late letter": Fault(letters(late_letter), None),
    "letter that cannot be": Fault(letters(impossible_letter), FreewheelError),
    "guide process killed": Fault(to_guides(signal.SIGKILL), None, NESTED),
    "guide process stands still": Fault(to_guides(signal.SIGSTOP), FinishReason.ERROR, NESTED),
}


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    """Every fault strikes the same engine: it is whole again after each."""
    return engine(folders["t32"], speculate=3, run_ahead=2, max_batch=2, graph="eager")


@pytest.fixture(scope="module")
def want(llm: LLM) -> dict[int, tuple[int, ...]]:
    """The tokens of undisturbed requests."""
    if_free, other = (one.token_ids for one in llm.generate([PROMPT, OTHER], FREE))
    found = {id(FREE): if_free, id(OTHER): other}
    for params in (NESTED, BIASED):
        found[id(params)] = llm.generate([PROMPT], params)[0].token_ids
    return found


def add(llm: LLM, prompt: list[int], params: SamplingParams) -> Live:
    return llm._session.add(llm._request(prompt, params, ""), TextStream(lambda ids: ""))


def run_to_end(case: Case, fault: Fault) -> None:
    """The fault strikes once both requests have said something."""
    session = case.llm._session
    while not (case.victim.request.output and case.other.request.output):
        session.step()
    fault.inflict(case)
    while session.busy:
        session.step()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if "guide" in name else [])
        for name in FAULTS
    ],
)
def test_a_fault_ends_what_it_must_and_the_engine_goes_on(
    llm: LLM, want: dict[int, tuple[int, ...]], name: str
) -> None:
    pytest.importorskip("llguidance")
    fault = FAULTS[name]
    prefix = llm._session.scheduler.copies[0].roster.reservations.prefix
    assert prefix is not None
    prefix.clear()  # the pages that are struck are the row's own
    case = Case(llm, add(llm, PROMPT, fault.params), add(llm, OTHER, FREE))
    llm._guides._seconds = 1.0 if fault.ends is FinishReason.ERROR else PATIENCE
    fatal = isinstance(fault.ends, type)
    with pytest.raises(fault.ends) if isinstance(fault.ends, type) else nullcontext():
        run_to_end(case, fault)
    victim, other = case.victim.request, case.other.request
    assert tuple(victim.output) == want[id(fault.params)][: len(victim.output)]
    assert tuple(other.output) == want[id(OTHER)][: len(other.output)]
    if not fatal:
        assert victim.finish is (fault.ends or victim.finish)
        assert tuple(other.output) == want[id(OTHER)], "the other one noticed"
    if fault.ends is None:
        assert tuple(victim.output) == want[id(fault.params)]
    llm._guides._seconds = PATIENCE
    after = [one.token_ids for one in llm.generate([PROMPT, OTHER], FREE)]
    assert after == [want[id(FREE)], want[id(OTHER)]]
    if fault.params is NESTED:
        assert llm.generate([PROMPT], NESTED)[0].token_ids == want[id(NESTED)]
    for pool in llm._session.scheduler.copies[0].roster.reservations.pools:
        assert pool.free + pool.cached == pool.total


@pytest.mark.exhaustive
def test_nan_in_a_kept_prompt_costs_two_answers_at_most(folders: dict[str, Path]) -> None:
    """One may be the request's own fault; the second one clears the prompt away."""
    llm = engine(folders["t32"], speculate=3, max_batch=2, graph="eager")
    want = llm.generate([PROMPT], FREE)[0].token_ids
    for tensor in caches_of(llm).values():
        tensor[:] = torch.nan  # all that is kept, and what is free
    ends = [llm.generate([PROMPT], FREE)[0] for _ in range(4)]
    assert [one.finish_reason is FinishReason.ERROR for one in ends] == [True, True, False, False]
    assert ends[2].token_ids == ends[3].token_ids == want
    assert ends[3].metrics.cached_tokens > 0


@pytest.mark.exhaustive
def test_requests_that_fail_by_themselves_do_not_clear_away_what_others_find(
    folders: dict[str, Path],
) -> None:
    llm = engine(folders["t32"], speculate=0, max_batch=2, graph="eager")
    doomed = SamplingParams(allowed_token_ids=(5,), bad_words=("\x05",), max_tokens=4)
    llm.generate([PROMPT], FREE)
    for _ in range(4):
        assert llm.generate([PROMPT], doomed)[0].finish_reason is FinishReason.ERROR
        assert llm.generate([PROMPT], FREE)[0].metrics.cached_tokens > 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_an_engine_for_which_there_is_no_memory_says_so_and_another_one_starts(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("freewheel.state.arena.Arena.new", full)
        with pytest.raises(error):
            engine(folders["t32"])
    assert engine(folders["t32"]).generate([OTHER], FREE)[0].token_ids


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_compiling_process_that_is_lost_costs_one_grammar(
    llm: LLM, kind: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("freewheel.structured.worker")
    wish = SamplingParams(regex=f"[a-c]{{{4 + kind}}}", max_tokens=40)
    llm._compiler._process.start()
    llm._compiler._seconds = 0.5
    with struck(kind, monkeypatch), pytest.raises(RequestError, match="regex: was not compiled"):
        llm.generate([OTHER], wish)
    llm._compiler._seconds = PATIENCE
    assert llm.generate([OTHER], wish)[0].finish_reason is FinishReason.STOP
